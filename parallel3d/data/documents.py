"""A table of a source's documents, 44 bytes each: places, sizes and digests."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from parallel3d.base.atomic import replaced
from parallel3d.base.errors import DataError
from parallel3d.data.cache import prune
from parallel3d.data.pieces import UNREADABLE, Flaw
from parallel3d.data.rows import ALL_ROWS, FileReader, Wanted
from parallel3d.data.skips import LISTED, Skips
from parallel3d.data.sources import Files, Progress, silent

# A document: number of its file; row or line in it, from 1; byte where the line starts; bytes of
# its text in UTF-8; their digest.
ENTRY = np.dtype(
    [("file", "<i4"), ("row", "<i8"), ("offset", "<i8"), ("num_bytes", "<i8"), ("digest", "V16")]
)
ROWS_PER_CHUNK = 2**14
# Part of an index's name: raise it when what is found in the same file changes.
INDEX_FORMAT = 4
# A file that changed so lately may change again within its clock's tick, unseen.
SECONDS_UNTIL_SETTLED = 2.0
DAYS_KEPT = 30
MEGABYTE = 1_000_000
DIGEST_BYTES = 16
# What is read after the first file with a flaw, to tell those of the next ones with it.
LOOK_ON_BYTES = 256 * MEGABYTE


class Documents:
    """The documents of a source, in order; `table` [n] of ENTRY holds their places.

    `skips` are those that were left out.
    """

    def __init__(self, files: Files, table: np.ndarray, skips: Skips | None = None) -> None:
        self.files, self.table, self.skips = files, table, skips or Skips()
        self._reader: tuple[int, FileReader] | None = None

    def __len__(self) -> int:
        return len(self.table)

    def name(self, index: int) -> str:
        """The name of a document in messages."""
        entry = self.table[index]
        return _reader(self.files, int(entry["file"])).place(int(entry["row"]))

    def read(self, indices: Sequence[int] | np.ndarray) -> Iterator[str]:
        """Texts of the documents `indices`, which ascend.

        Raises DataError for a document that changed since it was found.
        """
        text: list[str] = []
        for piece, last in self.pieces(indices):
            text.append(piece)
            if last:
                yield text[0] if len(text) == 1 else "".join(text)
                text.clear()

    def pieces(self, indices: Sequence[int] | np.ndarray) -> Iterator[tuple[str, bool]]:
        """Texts of the documents `indices`, long ones in pieces: text, and whether it is the last.

        That a long document changed is raised where its last piece would come.
        """
        entries = self.table[indices]
        for file, places in groupby(range(len(entries)), lambda i: int(entries["file"][i])):
            chosen = entries[list(places)]
            wanted = [Wanted(int(entry["row"]), int(entry["offset"])) for entry in chosen]
            reader, found = self._reader_of(file), 0
            before = None
            for piece in reader.read(wanted):
                if not piece.last or before:
                    before = before or blake2b(digest_size=DIGEST_BYTES)
                    before.update(piece.data)
                if piece.last:
                    seen = before.digest() if before else digest(piece.data)
                    if found == len(chosen) or seen != chosen[found]["digest"].tobytes():
                        break
                    found, before = found + 1, None
                yield piece.data.decode(), piece.last
            if found < len(chosen):
                place = reader.place(int(chosen[found]["row"]))
                raise DataError(f"{place} changed while the corpus was prepared; run it again")

    def _reader_of(self, file: int) -> FileReader:
        """The file's reader; the last one is kept, since it may read on where it is."""
        if self._reader is None or self._reader[0] != file:
            self._reader = file, _reader(self.files, file)
        return self._reader[1]


def find_documents(
    files: Files,
    cache: Path,
    progress: Progress = silent,
    rule: tuple[str, float] = ("stop", 0.0),
) -> Documents:
    """The documents in some files.

    Every file is read once, so that what is wrong with it is known before anything is written.
    What was found in a file of many rows is kept in `cache`/indexes for as long as the file is
    untouched (size, times and inode). Documents without text are left out, and by the `rule`
    ("skip", share) those that cannot be used, if they are no more than this share of all, where an
    unreadable file of rows counts as many as the mean of the readable ones. Raises DataError for
    all others of the first files at once, and where nothing is left.
    """
    on_error, max_skipped = rule
    tables, skips = [], Skips()
    num_rows: list[int] = []  # of each readable file
    num_lost: list[int] = []  # rows that were seen of each unreadable one
    sizes = [os.path.getsize(path) if os.path.exists(path) else 0 for path in files.paths]
    total = max(1, sum(sizes) // MEGABYTE)
    read_on = LOOK_ON_BYTES
    for file, path in enumerate(files.paths):
        reader = _reader(files, file)
        if files.kind == "whole":
            table, found = _scan(reader, silent, on_error)
            progress("reading files", file + 1, len(files.paths))
        else:
            before = sum(sizes[:file])

            def show(phase: str, done: int, _: int, before: int = before, file: int = file) -> None:
                progress(phase, (before + min(done, sizes[file])) // MEGABYTE, total)

            table, found = _indexed(reader, path, cache / "indexes", show, on_error)
            show("reading rows (MB)", sizes[file], 0)
        table["file"] = file
        tables.append(table)
        skips.join(found)
        if files.kind != "whole":
            lost = found.counts[UNREADABLE]
            (num_lost if lost else num_rows).append(lost or len(table) + found.num_flawed)
        if skips.num_flawed and on_error == "stop":
            read_on -= sizes[file]
            if read_on < 0 or len(skips.listed) == LISTED:
                break
    if skips.num_flawed and on_error == "stop":
        raise skips.refuse()
    table = np.concatenate(tables)
    mean = sum(num_rows) // max(1, len(num_rows))
    unseen = sum(max(0, mean - lost) for lost in num_lost)
    skips.check_share(len(table), max_skipped, unseen)
    if not len(table):
        name = files.names[0] + (f" and {len(files.names) - 1} more" if files.names[1:] else "")
        raise DataError(f"{name} has no text; give files that have some")
    return Documents(files, table, skips)


def digest(data: bytes) -> bytes:
    """A digest that tells one document's text from another's."""
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def _scan(reader: FileReader, progress: Progress, on_error: str) -> tuple[np.ndarray, Skips]:
    chunks: list[np.ndarray] = []
    rows: list[tuple[int, int, int, int, bytes]] = []
    num_bytes, skips = 0, Skips()
    before, length = None, 0
    for item in reader.scan():
        if isinstance(item, Flaw):
            before, length = None, 0
            if not item.row:
                # What a file held before it ended early is not told from what it lost.
                skips.add(reader.name, item, len(rows) + sum(len(chunk) for chunk in chunks))
                chunks, rows = [], []
                break
            skips.add(reader.name, item)
            if on_error == "stop" and len(skips.listed) == LISTED:
                break
            continue
        length += len(item.data)
        if not item.last or before:
            before = before or blake2b(digest_size=DIGEST_BYTES)
            before.update(item.data)
            progress("reading rows (MB)", num_bytes + length, 0)
        if item.last:
            found = before.digest() if before else digest(item.data)
            rows.append((0, item.row, item.offset, length, found))
            num_bytes += length
            before, length = None, 0
        if len(rows) == ROWS_PER_CHUNK:
            chunks.append(np.array(rows, dtype=ENTRY))
            rows.clear()
            progress("reading rows (MB)", num_bytes, 0)
    return np.concatenate([*chunks, np.array(rows, dtype=ENTRY)]), skips


def _indexed(
    reader: FileReader, path: str, indexes: Path, progress: Progress, on_error: str
) -> tuple[np.ndarray, Skips]:
    before = _signature(reader, path)
    index = indexes / f"{before}.npz"
    with suppress(OSError, ValueError, KeyError, BadZipFile), np.load(index) as kept:
        table, skips = kept["table"], Skips.unpacked(str(kept["skips"]), reader.name)
        os.utime(index)
        return table, skips
    started = time.time()
    table, skips = _scan(reader, progress, on_error)
    if (on_error == "stop" and skips.num_flawed) or skips.counts[UNREADABLE]:
        # Perhaps not read to its end; and what failed to be read may be read the next time.
        return table, skips
    # A cache that cannot be written is no matter here: it only saves time.
    with suppress(OSError):
        state = os.stat(path)
        settled = started - max(state.st_mtime, state.st_ctime) > SECONDS_UNTIL_SETTLED
        if settled and _signature(reader, path) == before:
            indexes.mkdir(parents=True, exist_ok=True)
            with replaced(index, shared=True) as partial, open(partial, "wb") as file:
                np.savez(file, table=table, skips=np.array(skips.packed()))
            prune(indexes, DAYS_KEPT)
    return table, skips


def _signature(reader: FileReader, path: str) -> str:
    name = os.path.realpath(path)
    parts: tuple[object, ...] = (INDEX_FORMAT, reader.kind, name, reader.field, reader.rows)
    if reader.kind == "jsonl":
        parts += (reader.max_line_bytes,)
    # What is not there is told by who reads it.
    with suppress(OSError):
        state = os.stat(path)
        parts += state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns
    return blake2b("\n".join(map(str, parts)).encode(), digest_size=16).hexdigest()


def _reader(files: Files, file: int) -> FileReader:
    rows = range(*files.rows[file]) if files.rows else ALL_ROWS
    return FileReader(
        files.kind, files.paths[file], files.names[file], files.field, rows, files.max_line_bytes
    )
