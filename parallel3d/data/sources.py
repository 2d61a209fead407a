"""Files of a source: the standard library, globs, or a data set of the hub."""

import glob
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parallel3d.base.errors import DataError

if TYPE_CHECKING:
    # A tokenising process, which reads no config, starts in half the time without it.
    from parallel3d.config.data import DataConfig, PartConfig

Progress = Callable[[str, int, int], None]
"""Called as progress(phase, done, total) while a phase goes on; the unit is the phase's own."""


def silent(phase: str, done: int, total: int) -> None:
    """A progress display that shows nothing."""


MAX_LINE_BYTES = 64 * 10**6  # of a line of JSON
NOT_LIBRARY = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}
KINDS = {"file": "whole", "line": "line", "blank_line": "blank_line"}
SUFFIX = {"text": "txt", "jsonl": "jsonl", "parquet": "parquet"}


@dataclass(frozen=True)
class Files:
    """The files of a source, in the order of its documents; `names` are for messages.

    `kind` is "whole" (a file is one document), "line", "blank_line" (documents end there), "jsonl",
    "parquet" or "arrow" (stream files of Arrow, as `datasets` caches them); `field` holds the text
    where a file has many documents. `rows`: first and end of those that count in each file, from 1;
    none where all do. `max_line_bytes` bounds a line of JSON.
    """

    kind: str
    paths: tuple[str, ...]
    names: tuple[str, ...]
    field: str = "text"
    rows: tuple[tuple[int, int], ...] = ()
    max_line_bytes: int = MAX_LINE_BYTES


def find_files(config: "DataConfig | PartConfig", max_line_bytes: int = MAX_LINE_BYTES) -> Files:
    """Return the files of a source that is no mixture, in an order that depends on names alone.

    Raises DataError where nothing matches, or a data set cannot be loaded.
    """
    source = config.source
    if source == "python-stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        library = library_files(root)
        names = tuple(str(path.relative_to(root)) for path in library)
        return Files("whole", tuple(map(str, library)), names)
    if source == "hub":
        # Takes a second to import: not for those who read files.
        from parallel3d.data.hub import arrow_files

        paths, names, rows = arrow_files(config.name, config.subset, config.split)
        return Files("arrow", paths, names, config.text_field, rows)
    if source not in SUFFIX:
        raise DataError(f"data.source={source!r} is not known; use one of: {', '.join(SUFFIX)}")
    found = tuple(matching_files(config.paths, SUFFIX[source]))
    kind = KINDS[config.documents] if source == "text" else source
    return Files(kind, found, found, config.text_field, max_line_bytes=max_line_bytes)


def library_files(root: Path) -> list[Path]:
    """Return the source files of the standard library at `root`, without tests and packages."""
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in NOT_LIBRARY]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


def matching_files(paths: Iterable[str], suffix: str = "txt") -> list[str]:
    """Return the files that `paths` (paths and globs, `**` too) name: sorted, each once.

    A link that leads nowhere is an unreadable file. Raises DataError for a path or glob that names
    no file; its examples end in `suffix`.
    """
    found: set[str] = set()
    for pattern in paths:
        place = f"data.paths: {pattern!r}"
        expanded = os.path.expanduser(pattern)
        # A name that exists is meant literally: file names may hold the brackets of a glob.
        if os.path.isdir(expanded):
            example = os.path.join(pattern, "**", f"*.{suffix}")
            raise DataError(f"{place} is a directory; write {example}")
        matches = [expanded]
        if not os.path.lexists(expanded):
            matches = list(_expand(expanded))
        files = {match for match in matches if os.path.isfile(match) or _leads_nowhere(match)}
        if not files:
            raise DataError(
                f"{place} matches no file (working directory {os.getcwd()});"
                f" give the path of a file, or a glob such as corpus/**/*.{suffix}"
            )
        found |= files
    if not found:
        raise DataError("data.paths is empty; this source needs paths or globs of files")
    return sorted({os.path.realpath(file): file for file in sorted(found)}.values())


def _expand(pattern: str) -> Iterator[str]:
    """Yield the files that a glob names, but none through a folder that holds itself by a link.

    Two links to their own folder are enough for `glob` never to end.
    """
    before, found, after = pattern.partition("**" + os.sep)
    if not found or (before and not before.endswith(os.sep)):
        yield from glob.glob(pattern, recursive=True)
        return
    for start in glob.glob(before) if before else [""]:
        for folder in _folders(start or os.curdir, ()):
            # Without **, which stands for no folder too; a second one is expanded in turn.
            inner = os.path.join(glob.escape(folder if start else folder[2:]), after)
            yield from _expand(inner) if after else [inner]


def _folders(folder: str, above: tuple[tuple[int, int], ...]) -> Iterator[str]:
    """Yield a folder and all below it, hidden ones left out, none within itself."""
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


def _leads_nowhere(path: str) -> bool:
    return os.path.islink(path) and not os.path.exists(path)
