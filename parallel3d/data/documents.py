"""The table of a source's documents (44 bytes each): places, sizes and digests."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from parallel3d.base.errors import DataError
from parallel3d.data.cache import digest_of, is_settled, load_index, save_index, state_of
from parallel3d.data.lines import EMPTY, UNREADABLE, Flaw
from parallel3d.data.rows import FileReader, place_of
from parallel3d.data.sources import Files, Progress, no_progress

LISTED = 20  # flaws in one message
LEAVE_OUT = 'or set data.on_error to "skip"'


class Listed(NamedTuple):
    """A flaw in the file `name`. `message` begins with `name`; row 0 means the whole file."""

    name: str
    row: int
    reason: str
    message: str


@dataclass
class Skips:
    """The documents skipped so far: `counts` by reason, and the first LISTED of them."""

    counts: Counter[str] = field(default_factory=Counter)
    listed: list[Listed] = field(default_factory=list)

    @property
    def num_flawed(self) -> int:
        """Number of unusable documents; empty documents do not count."""
        return self.counts.total() - self.counts[EMPTY]

    def add(self, name: str, flaw: Flaw, dropped: int = 0) -> None:
        """Count a flaw, or the number of documents of its file that are `dropped` for it."""
        self.counts[flaw.reason] += max(flaw.num_rows, dropped)
        if flaw.reason != EMPTY and len(self.listed) < LISTED:
            self.listed.append(Listed(name, flaw.row, flaw.reason, str(flaw)))

    def add_all(self, other: "Skips") -> None:
        """Add the skips of another file or source."""
        self.counts.update(other.counts)
        self.listed += other.listed[: LISTED - len(self.listed)]

    def packed(self) -> str:
        """Return the record of one file as JSON text, without the file's name."""
        listed = [(x.row, x.reason, x.message.removeprefix(x.name)) for x in self.listed]
        return json.dumps([self.counts, listed])

    @classmethod
    def unpacked(cls, text: str, name: str) -> "Skips":
        """Return the record of the file `name` from the output of `packed`."""
        counts, listed = json.loads(text)
        return cls(Counter(counts), [Listed(name, x[0], x[1], name + x[2]) for x in listed])

    def summary(self) -> dict[str, object]:
        """Return counts by reason, and the first flaws, as `prepare --json` prints them."""
        listed = [
            {"file": x.name, "line": x.row or None, "reason": x.reason, "message": x.message}
            for x in self.listed
        ]
        return {"skipped": dict(sorted(self.counts.items())), "skipped_first": listed}

    def error(self) -> DataError:
        """Return the error that lists the flaws."""
        messages = list(grouped_messages(self.listed))
        if len(self.listed) == 1:
            return DataError(f"{messages[0]}; {LEAVE_OUT}")
        summary = f"{self.num_flawed:,} documents cannot be used; fix them, {LEAVE_OUT}:"
        return DataError("\n  ".join([summary, *messages]))

    def check_share(self, num_documents: int, limit: float, unseen: int = 0) -> None:
        """Raise DataError if more than `limit` of all documents are unusable.

        `unseen` is an estimate of the uncounted documents in unreadable files.
        """
        flawed = self.num_flawed + unseen
        total = num_documents + flawed
        if flawed > limit * total:
            about = "about " if unseen else ""
            share = f"{about}{flawed:,} of {total:,} documents ({flawed / total:.1%})"
            rule = f"cannot be used, more than data.max_skipped = {limit} allows"
            messages = grouped_messages(self.listed)
            raise DataError("\n  ".join([f"{share} {rule}; fix them, or raise it:", *messages]))


def grouped_messages(listed: Iterable[Listed]) -> Iterable[str]:
    """Yield one message for each file and reason."""
    for (name, _), group in groupby(listed, lambda x: (x.name, x.reason)):
        first, *more = group
        rows = ", ".join(str(x.row) for x in more)
        if more and not first.row:
            rows = f"{len(more)} more"
        yield first.message + (f" ({name}: also {rows})" if more else "")


# Number of the file; row or line in it, from 1; first byte; bytes of the text; digest of the text.
ENTRY = np.dtype(
    [("file", "<i4"), ("row", "<i8"), ("offset", "<i8"), ("num_bytes", "<i8"), ("digest", "V16")]
)
ROWS_PER_CALL = 2**14  # rows between calls of progress
# Part of an index's name; raise it when scanning the same file yields something else.
INDEX_FORMAT = 4
MEGABYTE = 1_000_000
# After the first flawed file, read this much more, to report the flaws of the next files too.
LOOK_ON_BYTES = 256 * MEGABYTE
# Identifies a document's text.
new_digest = partial(blake2b, digest_size=16)


class Documents:
    """The documents of a source: `table` [n] of ENTRY has their places; `skips` were left out."""

    def __init__(self, files: Files, table: np.ndarray, skips: Skips | None = None) -> None:
        self.files, self.table, self.skips = files, table, skips or Skips()
        # Keep the last reader, which can continue from its position.
        self._reader = lru_cache(1)(partial(FileReader, files))

    def __len__(self) -> int:
        return len(self.table)

    def name(self, index: int) -> str:
        """Return the name of a document for messages."""
        entry = self.table[index]
        return place_of(self.files.kind, self.files.names[entry["file"]], int(entry["row"]))

    def read(self, indices: Sequence[int] | np.ndarray) -> Iterator[str]:
        """Yield the texts of the documents `indices` (ascending); DataError if one changed."""
        text: list[str] = []
        for piece, last in self.pieces(indices):
            text.append(piece)
            if last:
                yield "".join(text)
                text.clear()

    def pieces(self, indices: Sequence[int] | np.ndarray) -> Iterator[tuple[str, bool]]:
        """Yield the texts of the documents `indices` (ascending) as (piece, is the last one).

        Raises DataError instead of yielding the last piece of a document that has changed.
        """
        entries = self.table[indices]
        for file, numbers in groupby(range(len(entries)), lambda i: int(entries["file"][i])):
            chosen = entries[list(numbers)]
            places = zip(chosen["row"].tolist(), chosen["offset"].tolist(), strict=True)
            reader, num_read, digest = self._reader(file), 0, new_digest()
            for text, last in reader.read(places):
                digest.update(text.encode())
                if last:
                    if digest.digest() != chosen[num_read]["digest"].tobytes():
                        break
                    num_read, digest = num_read + 1, new_digest()
                yield text, last
            if num_read < len(chosen):
                place = reader.place(int(chosen[num_read]["row"]))
                raise DataError(f"{place} changed during the preparation; run it again")


def find_documents(
    files: Files,
    cache: Path,
    progress: Progress = no_progress,
    rule: tuple[str, float] = ("stop", 0.0),
) -> Documents:
    """Return the documents in `files`.

    Every file is read once, so that all flaws are known before anything is written. Tables of files
    with many rows are cached in `cache`/indexes until the file changes. Documents without text are
    left out.

    `rule` is (data.on_error, data.max_skipped). With "skip", unusable documents are left out, too,
    as long as their share is at most max_skipped. An unreadable file of rows counts as the average
    number of documents of the readable ones.

    Raises DataError for unusable documents with "stop", for too many with "skip", and if no
    document is left.
    """
    on_error, max_skipped = rule
    tables, skips = [], Skips()
    num_rows: list[int] = []  # rows of each readable file
    num_lost: list[int] = []  # rows seen in each unreadable file
    sizes = [os.path.getsize(path) if os.path.exists(path) else 0 for path in files.paths]
    total, done, read_on = max(1, sum(sizes) // MEGABYTE), 0, LOOK_ON_BYTES
    for file, (path, size) in enumerate(zip(files.paths, sizes, strict=True)):
        reader = FileReader(files, file)
        if files.kind == "whole":
            table, file_skips = _scan(reader, lambda _: None, on_error)
            progress("reading files", file + 1, len(files.paths))
        else:

            def on_bytes(count: int, before: int = done, size: int = size) -> None:
                progress("reading rows (MB)", (before + min(count, size)) // MEGABYTE, total)

            table, file_skips = _indexed(reader, path, cache / "indexes", on_bytes, on_error)
            on_bytes(size)
            lost = file_skips.counts[UNREADABLE]
            (num_lost if lost else num_rows).append(lost or len(table) + file_skips.num_flawed)
        done += size
        table["file"] = file
        tables.append(table)
        skips.add_all(file_skips)
        if skips.num_flawed and on_error == "stop":
            read_on -= size
            if read_on < 0 or len(skips.listed) == LISTED:
                break
    if skips.num_flawed and on_error == "stop":
        raise skips.error()
    table = np.concatenate(tables)
    mean = sum(num_rows) // max(1, len(num_rows))
    unseen = sum(max(0, mean - lost) for lost in num_lost)
    skips.check_share(len(table), max_skipped, unseen)
    if not len(table):
        name = files.names[0] + (f" and {len(files.names) - 1} more" if files.names[1:] else "")
        raise DataError(f"{name} has no text; use files with text")
    return Documents(files, table, skips)


def _scan(
    reader: FileReader, on_bytes: Callable[[int], None], on_error: str
) -> tuple[np.ndarray, Skips]:
    """Return the table of a file's documents; call `on_bytes` with the bytes read so far."""
    table, skips = bytearray(), Skips()
    num_bytes, length, digest = 0, 0, new_digest()
    for number, item in enumerate(reader.scan()):
        if isinstance(item, Flaw):
            length, digest = 0, new_digest()
            if not item.row:
                # No document of a damaged file is used, not even those before the damage.
                skips.add(reader.name, item, len(table) // ENTRY.itemsize)
                table.clear()
                break
            skips.add(reader.name, item)
            if on_error == "stop" and len(skips.listed) == LISTED:
                break
            continue
        data = item.text.encode()
        digest.update(data)
        length, num_bytes = length + len(data), num_bytes + len(data)
        if item.last:
            entry = (0, item.row, item.offset, length, digest.digest())
            table += np.array(entry, ENTRY).tobytes()
            length, digest = 0, new_digest()
        if not item.last or number % ROWS_PER_CALL == 0:
            on_bytes(num_bytes)
    return np.frombuffer(table, ENTRY), skips


def _indexed(
    reader: FileReader, path: str, indexes: Path, on_bytes: Callable[[int], None], on_error: str
) -> tuple[np.ndarray, Skips]:
    index = indexes / f"{_signature(reader, path)}.npz"
    if saved := load_index(index):
        return saved["table"], Skips.unpacked(str(saved["skips"]), reader.name)
    settled = is_settled(path)
    table, skips = _scan(reader, on_bytes, on_error)
    # Do not save an incomplete table, nor read errors, which may be temporary.
    is_partial = (on_error == "stop" and skips.num_flawed) or skips.counts[UNREADABLE]
    if settled and not is_partial and index.stem == _signature(reader, path):
        save_index(index, {"table": table, "skips": np.array(skips.packed())})
    return table, skips


def _signature(reader: FileReader, path: str) -> str:
    parts = [INDEX_FORMAT, reader.kind, os.path.realpath(path), reader.field, reader.rows]
    parts += [reader.max_line_bytes] if reader.kind == "jsonl" else []
    return digest_of(*parts, *state_of(path))
