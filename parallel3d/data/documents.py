"""The documents of a source as a table, 44 bytes each: their places, sizes and digests."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import groupby
from pathlib import Path

import numpy as np

from parallel3d.atomic import replaced
from parallel3d.data.cache import prune
from parallel3d.data.rows import FileReader, Wanted
from parallel3d.data.sources import Files, Progress, silent
from parallel3d.errors import DataError

# A document: number of its file; row or line in it, from 1; byte where the line starts; bytes of
# its text in UTF-8; their digest.
ENTRY = np.dtype(
    [("file", "<i4"), ("row", "<i8"), ("offset", "<i8"), ("num_bytes", "<i8"), ("digest", "V16")]
)
ROWS_PER_CHUNK = 2**14
# Part of an index's name: raise it when what is found in the same file changes.
INDEX_FORMAT = 1
# A file that changed so lately may change again within its clock's tick, unseen.
SECONDS_UNTIL_SETTLED = 2.0
DAYS_KEPT = 30
MEGABYTE = 1_000_000


class Documents:
    """The documents of a source, in order: `table`, [n] of ENTRY, says where each one is."""

    def __init__(self, files: Files, table: np.ndarray) -> None:
        self.files, self.table = files, table
        self._reader: tuple[int, FileReader] | None = None

    def __len__(self) -> int:
        return len(self.table)

    def name(self, index: int) -> str:
        """Give the name of a document in messages."""
        entry = self.table[index]
        return _reader(self.files, int(entry["file"])).place(int(entry["row"]))

    def read(self, indices: Sequence[int] | np.ndarray) -> Iterator[str]:
        """Give the texts of the documents `indices`, which ascend.

        Raises DataError for a document that changed since it was found.
        """
        entries = self.table[indices]
        for file, places in groupby(range(len(entries)), lambda i: int(entries["file"][i])):
            chosen = entries[list(places)]
            wanted = [Wanted(int(entry["row"]), int(entry["offset"])) for entry in chosen]
            reader, found = self._reader_of(file), 0
            for row, entry in zip(reader.read(wanted), chosen, strict=False):
                if digest(row.data) != entry["digest"].tobytes():
                    break
                found += 1
                yield row.data.decode()
            if found < len(chosen):
                place = reader.place(int(chosen[found]["row"]))
                raise DataError(f"{place} changed while the corpus was prepared; run it again")

    def _reader_of(self, file: int) -> FileReader:
        """Give the file's reader; the last one is kept, since it may read on where it is."""
        if self._reader is None or self._reader[0] != file:
            self._reader = file, _reader(self.files, file)
        return self._reader[1]


def find_documents(files: Files, cache: Path, progress: Progress = silent) -> Documents:
    """Give the documents of the files.

    Every file is read once, so that what is wrong with it is known before anything is written.
    What was found in a file of many rows is kept in `cache`/indexes for as long as the file is
    untouched (size, times and inode). Raises DataError for what cannot be used.
    """
    tables = []
    sizes = [os.path.getsize(path) if os.path.exists(path) else 0 for path in files.paths]
    total = max(1, sum(sizes) // MEGABYTE)
    for file, path in enumerate(files.paths):
        reader = _reader(files, file)
        if files.kind == "whole":
            table = _scan(reader, silent)
            progress("reading files", file + 1, len(files.paths))
        else:
            before = sum(sizes[:file])

            def show(phase: str, done: int, _: int, before: int = before, file: int = file) -> None:
                progress(phase, (before + min(done, sizes[file])) // MEGABYTE, total)

            table = _indexed(reader, path, cache / "indexes", show)
            show("reading rows (MB)", sizes[file], 0)
            if not len(table):
                raise DataError(f"{reader.name} has no text; remove it, or leave it out")
        table["file"] = file
        tables.append(table)
    return Documents(files, np.concatenate(tables))


def digest(data: bytes) -> bytes:
    """Give what tells one document's text from another's."""
    return blake2b(data, digest_size=16).digest()


def _scan(reader: FileReader, progress: Progress) -> np.ndarray:
    chunks, rows, num_bytes = [], [], 0
    for row, offset, data in reader.scan():
        rows.append((0, row, offset, len(data), digest(data)))
        num_bytes += len(data)
        if len(rows) == ROWS_PER_CHUNK:
            chunks.append(np.array(rows, dtype=ENTRY))
            rows.clear()
            progress("reading rows (MB)", num_bytes, 0)
    return np.concatenate([*chunks, np.array(rows, dtype=ENTRY)])


def _indexed(reader: FileReader, path: str, indexes: Path, progress: Progress) -> np.ndarray:
    before = _signature(reader, path)
    index = indexes / f"{before}.npy"
    with suppress(OSError, ValueError):
        table = np.load(index, allow_pickle=False)
        os.utime(index)
        return table
    started = time.time()
    table = _scan(reader, progress)
    # A cache that cannot be written is no matter here: it only saves time.
    with suppress(OSError):
        state = os.stat(path)
        settled = started - max(state.st_mtime, state.st_ctime) > SECONDS_UNTIL_SETTLED
        if settled and _signature(reader, path) == before:
            indexes.mkdir(parents=True, exist_ok=True)
            with replaced(index, shared=True) as partial, open(partial, "wb") as file:
                np.save(file, table, allow_pickle=False)
            prune(indexes, DAYS_KEPT)
    return table


def _signature(reader: FileReader, path: str) -> str:
    parts: tuple[object, ...] = (INDEX_FORMAT, reader.kind, os.path.realpath(path), reader.field)
    # What is not there is told by who reads it.
    with suppress(OSError):
        state = os.stat(path)
        parts += state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns
    return blake2b("\n".join(map(str, parts)).encode(), digest_size=16).hexdigest()


def _reader(files: Files, file: int) -> FileReader:
    return FileReader(files.kind, files.paths[file], files.names[file], files.field)
