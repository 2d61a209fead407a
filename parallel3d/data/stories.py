"""Prose to train on: the King James Bible of Debian's package bible-kjv, in the public domain."""

import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

from parallel3d.base.atomic import replace_text
from parallel3d.base.errors import ConfigError


def write_stories(folder: Path = Path("stories")) -> str:
    """Write one file for each book to `folder`, and return a pattern of their paths.

    Raises ConfigError if the package's program is missing or prints nothing.
    """
    program = shutil.which("bible")
    if program is None:
        raise ConfigError(
            "--data = stories: needs the program `bible`, which prints the King James Bible; run "
            "`apt-get install bible-kjv`, or set --data.source and --data.paths to your own text"
        )
    words = [program, "-f", "gen1:1-rev22:21"]  # a line for each verse: Ge1:1 In the beginning
    printed = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60).stdout
    books = defaultdict[str, list[str]](list)
    for place, _, verse in (line.partition(" ") for line in printed.splitlines()):
        books[place.partition(":")[0].rstrip("0123456789")].append(verse)
    if not books:
        raise ConfigError(
            f"--data = stories: {program} printed no verse; use the one of the package bible-kjv"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for book, verses in books.items():
        replace_text(folder / f"{book}.txt", "\n".join([*verses, ""]))
    return f"{folder}/*.txt"
