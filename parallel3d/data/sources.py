"""The files of a source: the standard library, paths and globs, or a data set of the hub.

Data sets of the hub, or of a folder, are loaded and cached by `datasets`.
"""

import glob
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parallel3d.base.atomic import replace_text
from parallel3d.base.errors import ConfigError, DataError, first_line
from parallel3d.base.hub_access import is_path, why_unreachable

if TYPE_CHECKING:
    from datasets import Dataset

    # Tokenising workers read no config; without this import they start in half the time.
    from parallel3d.config.data import DataConfig, PartConfig

Progress = Callable[[str, int, int], None]
"""Called as progress(phase, done, total) during a phase; each phase has its own unit."""


OnCount = Callable[[int], None]
"""Called with a number of units that are done."""


def no_progress(phase: str, done: int, total: int) -> None:
    """Ignore the progress."""


MAX_LINE_BYTES = 64 * 10**6  # longest line of JSON
NOT_LIBRARY = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}
KINDS = {"file": "whole", "line": "line", "blank_line": "blank_line"}
SUFFIX = {"text": "txt", "jsonl": "jsonl", "parquet": "parquet", "chat": "jsonl"}
# Written by Dataset.save_to_disk and DatasetDict.save_to_disk; load_dataset cannot read them.
SAVED = ("state.json", "dataset_dict.json")
LINES_OF_JSON = re.compile(r"\.(jsonl|ndjson)(\.\w+)?$", re.IGNORECASE)
"""The name of a file with lines of JSON, compressed or not."""


@dataclass(frozen=True)
class Files:
    """The files of a source, in the order of its documents."""

    kind: str
    """How a file is divided into documents:

    - "whole": one document per file
    - "line": one document per line
    - "blank_line": documents separated by blank lines
    - "jsonl", "parquet": one document per row
    - "arrow": one document per row of an Arrow stream file, as `datasets` caches them
    """
    paths: tuple[str, ...]
    names: tuple[str, ...]
    """The files' names in messages."""
    field: str = "text"
    """The field or column that holds the text, where rows have several."""
    rows: tuple[tuple[int, int], ...] = ()
    """First row and end (exclusive) of the rows to use in each file, from 1; empty: all rows."""
    max_line_bytes: int = MAX_LINE_BYTES
    """Limit for one line of JSON."""


def find_files(config: "DataConfig | PartConfig", max_line_bytes: int = MAX_LINE_BYTES) -> Files:
    """Return the files of a source other than a mixture, in an order that depends on names alone.

    Raises DataError if nothing matches, if a data set cannot be loaded, or if all files of "text"
    have lines of JSON.
    """
    source = config.source
    if source == "python-stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        library = library_files(root)
        names = tuple(str(path.relative_to(root)) for path in library)
        return Files("whole", tuple(map(str, library)), names)
    if source == "hub":
        paths, names, rows = arrow_files(config.name, config.subset, config.split)
        return Files("arrow", paths, names, config.text_field, rows)
    paths = tuple(matching_files(config.paths, SUFFIX[source]))
    kind = KINDS[config.documents] if source == "text" else source
    if kind in ("whole", "blank_line") and all(map(LINES_OF_JSON.search, paths)):
        raise DataError(
            f'data.paths: {paths[0]} has lines of JSON by its name, and source "text" would train '
            'on its braces and keys; set data.source to "jsonl", or data.documents to "line" to '
            "train on the lines as they are, or rename the files if each is one document"
        )
    return Files(kind, paths, paths, config.text_field, max_line_bytes=max_line_bytes)


def library_files(root: Path) -> list[Path]:
    """Return the source files of the standard library at `root`, without tests and packages."""
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in NOT_LIBRARY]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


def matching_files(paths: Iterable[str], suffix: str = "txt") -> list[str]:
    """Return the files that `paths` match (paths and globs, also with `**`), sorted, each once.

    A dangling link counts as a file; reading it fails later. Raises DataError for a path or glob
    that matches no file; `suffix` is used in the message's example.
    """
    matched: set[str] = set()
    for pattern in paths:
        place = f"data.paths: {pattern!r}"
        # An existing path is taken literally: file names may contain brackets, as globs do.
        if os.path.isdir(pattern):
            example = os.path.join(pattern, "**", f"*.{suffix}")
            raise DataError(f"{place} is a directory; use a glob such as {example}")
        if os.path.exists(pattern) and not os.path.isfile(pattern):
            raise DataError(
                f"{place} is not a regular file (files are read several times); copy the contents"
                " to one"
            )
        matches = [pattern]
        if not os.path.lexists(pattern):
            matches = list(_expand(pattern))
        # What matches and does not exist is a dangling link.
        files = {match for match in matches if os.path.isfile(match) or not os.path.exists(match)}
        if not files:
            raise DataError(
                f"{place} matches no file (working directory {os.getcwd()});"
                f" use the path of a file, or a glob such as corpus/**/*.{suffix}"
            )
        matched |= files
    return sorted({os.path.realpath(file): file for file in sorted(matched)}.values())


def _expand(pattern: str) -> Iterator[str]:
    """Yield the files that a glob matches; a folder is entered once, since links may form loops.

    Two links from a folder into itself are enough for `glob` never to end.
    """
    before, stars, after = pattern.partition("**" + os.sep)
    if not stars or (before and not before.endswith(os.sep)):
        yield from glob.glob(pattern, recursive=True)
        return
    entered: set[str] = set()
    for start in glob.glob(before) if before else [os.curdir]:
        for folder, below, _ in os.walk(start, followlinks=True):
            below[:] = sorted(name for name in below if not name.startswith("."))
            real = os.path.realpath(folder)
            if real in entered:
                below.clear()
                continue
            entered.add(real)
            # The folder replaces `**`, which also matches no folder; a second `**` recurses.
            yield from _expand(os.path.normpath(os.path.join(glob.escape(folder), after)))


def arrow_files(
    name: str, subset: str | None, split: str
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[int, int], ...]]:
    """Return paths, names and rows of the Arrow files that hold the split, in order.

    - `name`: a name on the hub, or a folder of jsonl, parquet, text or csv files, or one written by
      `save_to_disk`
    - `split`: a split, a part of one such as "train[:50%]", or a sum of these
    - rows: for each file the first row and the end (exclusive), from 1; empty for complete splits

    Code of data sets is never executed. Raises DataError if the split cannot be loaded.
    """
    of_subset = f", subset {subset!r}" if subset else ""
    place = f"data.name = {name!r}{of_subset}"
    files_of: dict[str, list[tuple[str, str, int]]] = {}
    for part in split.split("+"):
        base = part.partition("[")[0]
        if base not in files_of:
            files_of[base] = _files(_load(name, subset, base, place), name, base, place)
    if split in files_of:
        paths, names, _ = zip(*files_of[split], strict=True)
        return paths, names, ()
    import datasets

    lengths = {}
    for base, files in files_of.items():
        lengths[base] = sum(count for _, _, count in files)
    try:
        instructions = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    except (ValueError, AssertionError) as error:
        raise DataError(
            f'{place}: split {split!r} is invalid ({error}); write a part as "train[:50%]" or'
            ' "train[1000:2000]"'
        ) from None
    cut = []
    for wanted in instructions:
        before = 0
        for path, label, count in files_of[wanted.splitname]:
            first = max(wanted.from_, before)
            end = min(wanted.to, before + count)
            if first < end:
                cut.append((path, label, (first - before + 1, end - before + 1)))
            before += count
    if not cut:
        raise DataError(f"{place}: split {split!r} has no rows; use another split")
    paths, names, rows = zip(*cut, strict=True)
    return paths, names, rows


def _files(table: "Dataset", name: str, split: str, place: str) -> list[tuple[str, str, int]]:
    """Return path, name and number of rows of each Arrow file of a complete split."""
    paths = [file["filename"] for file in table.cache_files]
    if not len(table):
        raise DataError(f"{place}: split {split!r} has no rows; use another split")
    counts = [_num_rows(path) for path in paths]
    if sum(counts) != len(table):
        raise DataError(
            f"{place}: split {split!r} is a selection of its files' rows; call flatten_indices,"
            " then save_to_disk, and use that folder"
        )
    labels = [f"{name} {split}"]
    if len(paths) > 1:
        labels = [f"{name} {split} ({Path(path).name})" for path in paths]
    return list(zip(paths, labels, counts, strict=True))


def has_split(name: str, subset: str | None, split: str) -> bool:
    """True if the data set has a split of this name.

    If the hub cannot be reached, print a warning on standard error and return False.
    """
    if (Path(name) / SAVED[0]).is_file():
        return False  # it is one table
    try:
        _load(name, subset, split, f"data.name = {name!r}")
    except DataError as error:
        if isinstance(error.__cause__, ConnectionError):
            print(
                f"WARNING: {error}. Training continues without this validation set; to silence this"
                " warning, set data.validation_split to null",
                file=sys.stderr,
            )
        return not isinstance(error.__cause__, (ConnectionError, ValueError))
    return True


def arrow_files_of_parquet(paths: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return paths and names of the Arrow files in which `datasets` caches parquet files."""
    more = f" and {len(paths) - 1} more" if paths[1:] else ""
    name = f"{paths[0]}{more}"
    table = _load("parquet", None, "train", f"data.paths: {name}", paths)
    files, names, _ = zip(*_files(table, name, "train", f"data.paths: {name}"), strict=True)
    return files, names


def _load(
    name: str, subset: str | None, split: str, place: str, files: list[str] | None = None
) -> "Dataset":
    import datasets

    folder = Path(name)
    if is_path(name) and not folder.is_dir():
        raise DataError(
            f"{place} is not a folder; use the path of a folder, or a name such as owner/dataset"
        )
    datasets.disable_progress_bars()  # they would disturb ours
    try:
        if any((folder / file).is_file() for file in SAVED):
            saved = datasets.load_from_disk(str(folder))
            if isinstance(saved, datasets.DatasetDict) and split not in saved:
                raise ValueError(f"the splits are {', '.join(saved)}")
            return saved[split] if isinstance(saved, datasets.DatasetDict) else saved
        if files:
            return datasets.load_dataset(name, data_files=files, split=split)
        cached = Path(datasets.config.HF_DATASETS_CACHE, name.replace("/", "___"))
        why = "" if folder.is_dir() or cached.is_dir() else why_unreachable()
        if why:
            raise ConnectionError(f"not a local folder, and the hub is unreachable: {why}")
        return datasets.load_dataset(str(folder) if folder.is_dir() else name, subset, split=split)
    # Broad: `datasets` passes on any error of the network, of file formats, of unknown names.
    except Exception as error:
        reason = first_line(error).rstrip(".")
        raise DataError(
            f"{place}: split {split!r} cannot be loaded ({reason}); check name, subset"
            " and split. Without network access, download the data set elsewhere and set data.name"
            " to its folder"
        ) from error


def _num_rows(path: str) -> int:
    import pyarrow as pa

    with pa.memory_map(path) as source, pa.ipc.open_stream(source) as stream:
        return sum(batch.num_rows for batch in stream)


def write_stories(folder: Path = Path("stories")) -> str:
    """Write one file for each book to `folder`, and return a pattern of their paths.

    Raises ConfigError if the package's program is missing.
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
    for line in printed.splitlines():
        place, _, verse = line.partition(" ")
        books[place.partition(":")[0].rstrip("0123456789")].append(verse)
    folder.mkdir(parents=True, exist_ok=True)
    for book, verses in books.items():
        replace_text(folder / f"{book}.txt", "\n".join([*verses, ""]))
    return f"{folder}/*.txt"
