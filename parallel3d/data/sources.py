"""The files of a source: the standard library, paths and globs, or a data set of the hub."""

import glob
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parallel3d.base.errors import DataError

if TYPE_CHECKING:
    # Tokenising workers read no config; without this import they start in half the time.
    from parallel3d.config.data import DataConfig, PartConfig

Progress = Callable[[str, int, int], None]
"""Called as progress(phase, done, total) during a phase; each phase has its own unit."""


def no_progress(phase: str, done: int, total: int) -> None:
    """Ignore the progress."""


MAX_LINE_BYTES = 64 * 10**6  # longest line of JSON
NOT_LIBRARY = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}
KINDS = {"file": "whole", "line": "line", "blank_line": "blank_line"}
SUFFIX = {"text": "txt", "jsonl": "jsonl", "parquet": "parquet"}


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

    Raises DataError if nothing matches, or if a data set cannot be loaded.
    """
    source = config.source
    if source == "python-stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        library = library_files(root)
        names = tuple(str(path.relative_to(root)) for path in library)
        return Files("whole", tuple(map(str, library)), names)
    if source == "hub":
        # The import takes a second; sources that read files do not need it.
        from parallel3d.data.hub import arrow_files

        paths, names, rows = arrow_files(config.name, config.subset, config.split)
        return Files("arrow", paths, names, config.text_field, rows)
    if source not in SUFFIX:
        raise DataError(f"data.source = {source!r} is unknown; use one of: {', '.join(SUFFIX)}")
    paths = tuple(matching_files(config.paths, SUFFIX[source]))
    kind = KINDS[config.documents] if source == "text" else source
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
        expanded = os.path.expanduser(pattern)
        # An existing path is taken literally: file names may contain brackets, as globs do.
        if os.path.isdir(expanded):
            example = os.path.join(pattern, "**", f"*.{suffix}")
            raise DataError(f"{place} is a directory; use a glob such as {example}")
        if os.path.exists(expanded) and not os.path.isfile(expanded):
            rule = "is not a regular file (files are read several times)"
            raise DataError(f"{place} {rule}; copy the contents to one")
        matches = [expanded]
        if not os.path.lexists(expanded):
            matches = list(_expand(expanded))
        files = {match for match in matches if os.path.isfile(match) or _is_dangling(match)}
        if not files:
            raise DataError(
                f"{place} matches no file (working directory {os.getcwd()});"
                f" use the path of a file, or a glob such as corpus/**/*.{suffix}"
            )
        matched |= files
    if not matched:
        raise DataError("data.paths is empty; this source needs paths or globs of files")
    return sorted({os.path.realpath(file): file for file in sorted(matched)}.values())


def _expand(pattern: str) -> Iterator[str]:
    """Yield the files that a glob matches, without following links from a folder into itself.

    Two such links are enough for `glob` never to end.
    """
    before, stars, after = pattern.partition("**" + os.sep)
    if not stars or (before and not before.endswith(os.sep)):
        yield from glob.glob(pattern, recursive=True)
        return
    for start in glob.glob(before) if before else [""]:
        for folder in _folders(start or os.curdir, ()):
            # The folder replaces `**`, which also matches no folder; a second `**` recurses.
            inner = os.path.join(glob.escape(folder if start else folder[2:]), after)
            yield from _expand(inner) if after else [inner]


def _folders(folder: str, above: tuple[tuple[int, int], ...]) -> Iterator[str]:
    """Yield a folder and its visible subfolders, skipping those that are also among `above`."""
    try:
        state = os.stat(folder)
        here = (state.st_dev, state.st_ino)
        below = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    except OSError:
        return
    if here in above:
        return
    yield folder
    for name in below:
        if not name.startswith("."):
            yield from _folders(os.path.join(folder, name), (*above, here))


def _is_dangling(path: str) -> bool:
    return os.path.islink(path) and not os.path.exists(path)
