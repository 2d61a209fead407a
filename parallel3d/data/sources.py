"""Where documents come from: files, one document each, as a stream of `datasets`."""

import glob
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from parallel3d.errors import DataError

if TYPE_CHECKING:
    from datasets import IterableDataset

Progress = Callable[[str, int, int], None]
"""Called as progress(phase, done, total) while a phase goes on; the unit is the phase's own."""


def silent(phase: str, done: int, total: int) -> None:
    """Show no progress."""


NOT_LIBRARY = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Document:
    """One file of text: its name in messages, its place, its bytes and their digest."""

    name: str
    path: str
    num_bytes: int
    digest: str


def find_documents(
    source: str, paths: Sequence[str] = (), progress: Progress = silent
) -> list[Document]:
    """Give the documents of `source` in an order that depends on names alone.

    Every file is read once, so that what is wrong with it is known before anything is written.
    Raises DataError where nothing matches, or a file is empty, unreadable or not UTF-8.
    """
    if source == "python-stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = [(str(path.relative_to(root)), str(path)) for path in library_files(root)]
    elif source == "text":
        files = [(path, path) for path in matching_files(paths)]
    else:
        raise DataError(f"data.source={source!r} is not known; use 'python-stdlib' or 'text'")
    return list(_examine(files, progress))


def library_files(root: Path) -> list[Path]:
    """Give the source files of the standard library at `root`, without tests, idlelib, packages.

    Empty files (a few `__init__.py`) are no documents.
    """
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in NOT_LIBRARY]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(path for path in files if path.stat().st_size > 0)


def matching_files(paths: Iterable[str]) -> list[str]:
    """Give the files that `paths` (paths and globs, `**` too) name: sorted, each once.

    Raises DataError for a path or glob that names no file.
    """
    found: set[str] = set()
    for pattern in paths:
        place = f"data.paths: {pattern!r}"
        expanded = os.path.expanduser(pattern)
        # What exists is meant literally: file names may hold the brackets of a glob.
        if os.path.isdir(expanded):
            raise DataError(f"{place} is a directory; write {os.path.join(pattern, '**', '*.txt')}")
        matches = [expanded]
        if not os.path.exists(expanded):
            matches = glob.glob(expanded, recursive=True)
        files = {match for match in matches if os.path.isfile(match)}
        if not files:
            raise DataError(
                f"{place} matches no file (working directory {os.getcwd()});"
                " give the path of a UTF-8 text file, or a glob such as corpus/**/*.txt"
            )
        found |= files
    if not found:
        raise DataError(
            "data.paths is empty; data.source 'text' needs paths or globs of text files"
        )
    return sorted({os.path.realpath(file): file for file in sorted(found)}.values())


def read_documents(documents: Sequence[Document]) -> "IterableDataset":
    """Give a stream of rows {name, path, digest, text} in the order of `documents`.

    `load_dataset("text")` is not used: it drops files whose names hold brackets, changes line
    ends, caches by file name and calls home (datasets 5.2). A table in memory with a lazy map
    does none of that. Raises DataError, when read, for a file that changed since it was found.
    """
    from datasets import Dataset  # takes a second: not for those who find the corpus in the cache

    columns = {
        "name": [document.name for document in documents],
        "path": [document.path for document in documents],
        "digest": [document.digest for document in documents],
    }
    return Dataset.from_dict(columns).to_iterable_dataset().map(_add_text)


def _add_text(row: dict[str, str]) -> dict[str, str]:
    data = _read(row["path"])
    if _digest(data) != row["digest"]:
        raise DataError(f"{row['path']} changed while the corpus was prepared; run it again")
    return {"text": data.decode("utf-8")}


def _examine(files: Sequence[tuple[str, str]], progress: Progress) -> Iterator[Document]:
    for index, (name, path) in enumerate(files):
        data = _read(path)
        if not data:
            raise DataError(f"{path} is empty; remove it, or leave it out of data.paths")
        try:
            data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
                f" ({error.reason}); convert the file with iconv, or leave it out of data.paths"
            ) from None
        progress("reading files", index + 1, len(files))
        yield Document(name, path, len(data), _digest(data))


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); make it readable, or leave it out"
        ) from error


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=20).hexdigest()
