"""The table of a source's documents (44 bytes each): places, sizes and digests."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import groupby
from math import ceil
from pathlib import Path

import numpy as np

from parallel3d.base.errors import DataError
from parallel3d.data.cache import digest_of, load_index, save_index, state_of
from parallel3d.data.facts import Facts, SkippedDocument
from parallel3d.data.lines import ORDINARY, UNREADABLE, Flaw, Piece
from parallel3d.data.rows import FileReader, new_digest, place_of
from parallel3d.data.sources import Files, OnCount, Progress, no_progress

LISTED = 20  # flaws in one message


@dataclass
class Skips:
    """The documents skipped so far: `counts` by reason, and the first LISTED of them."""

    counts: Counter[str] = field(default_factory=Counter)
    listed: list[SkippedDocument] = field(default_factory=list)

    @property
    def num_flawed(self) -> int:
        """Number of unusable documents; those without text and unfit conversations do not count."""
        return self.counts.total() - sum(self.counts[reason] for reason in ORDINARY)

    def add(self, name: str, flaw: Flaw, dropped: int = 0) -> None:
        """Count a flaw, or the number of documents of its file that are `dropped` for it."""
        self.counts[flaw.reason] += max(flaw.num_rows, dropped)
        if flaw.reason not in ORDINARY and len(self.listed) < LISTED:
            self.listed.append(
                {
                    "file": name,
                    "line": flaw.row or None,
                    "reason": flaw.reason,
                    "message": str(flaw),
                }
            )

    def add_all(self, other: "Skips") -> None:
        """Add the skips of another file or source."""
        self.counts.update(other.counts)
        self.listed += other.listed[: LISTED - len(self.listed)]

    def add_to(self, facts: Facts) -> Facts:
        """Add the counts by reason, and the first flaws."""
        return replace(facts, skipped=dict(sorted(self.counts.items())), skipped_first=self.listed)

    def stop(self, what: str, usable: int, limit: float) -> DataError:
        """Return the error of a preparation that stops at flaws.

        - `usable`: the others that were read; all, unless LISTED flaws ended the reading.
        - `limit`: data.max_skipped, up to which "skip" is a remedy.
        """
        flawed = self.num_flawed
        rule = f"{flawed:,} {what} cannot be used; fix them"
        if flawed == 1:
            rule = f"1 {what.removesuffix('s')} cannot be used; fix it"
        if len(self.listed) == LISTED:
            rule = f"{LISTED} {what} or more cannot be used (reading stopped there); fix them"
        if usable and flawed > limit * (flawed + usable):
            share = ceil(100 * flawed / (flawed + usable)) / 100
            rule += f', or set data.on_error to "skip" and data.max_skipped to {share:.2f} or more'
        elif usable or len(self.listed) == LISTED:
            rule += ', or set data.on_error to "skip"'
        return self.error(rule)

    def error(self, rule: str) -> DataError:
        """Return the error with this rule and remedy, and the first flaws."""
        between = "\n  " if self.listed[1:] else " "
        return DataError(between.join([f"{rule}:", *(flaw["message"] for flaw in self.listed)]))

    def check_share(self, flawed: int, usable: int, limit: float, what: str = "documents") -> None:
        """Raise DataError if the share of flawed documents or files is above `limit`, or all."""
        total = flawed + usable
        if flawed and not usable:
            raise self.error(f"none of {total:,} {what} can be used; fix them")
        if flawed > limit * total:
            raise self.error(
                f"{flawed:,} of {total:,} {what} ({flawed / total:.1%}) cannot be used, more than"
                f" data.max_skipped = {limit} allows; fix them, or raise it"
            )


# Number of the file; row or line in it, from 1; first byte; bytes of the text; digest of the text.
ENTRY = np.dtype(
    [("file", "<i4"), ("row", "<i8"), ("offset", "<i8"), ("num_bytes", "<i8"), ("digest", "V16")]
)
ROWS_PER_CALL = 2**14  # rows between calls of progress
# Part of an index's name; raise it when scanning the same file yields something else.
INDEX_FORMAT = 5
MEGABYTE = 1_000_000


class Documents:
    """The documents of a source: `table` [n] of ENTRY has their places; `skips` were left out."""

    def __init__(self, files: Files, table: np.ndarray, skips: Skips | None = None) -> None:
        self.files = files
        self.table = table
        self.skips = skips or Skips()
        # Keep the last reader, which can continue from its position.
        self._reader = lru_cache(1)(partial(FileReader, files))

    def __len__(self) -> int:
        return len(self.table)

    def name(self, index: int) -> str:
        """Return the name of a document for messages."""
        entry = self.table[index]
        return place_of(self.files.kind, self.files.names[entry["file"]], int(entry["row"]))

    def pieces(self, indices: Sequence[int] | np.ndarray) -> Iterator[Piece]:
        """Yield the texts of the documents `indices` (ascending) as (piece, is the last one).

        Raises DataError instead of yielding the last piece of a document that has changed.
        """
        entries = self.table[indices]
        for file, numbers in groupby(range(len(entries)), lambda i: int(entries["file"][i])):
            chosen = entries[list(numbers)]
            places = zip(chosen["row"].tolist(), chosen["offset"].tolist(), strict=True)
            reader = self._reader(file)
            num_read = 0
            digest = new_digest()
            for text, last in reader.read(places):
                digest.update(text.encode())
                if last:
                    if digest.digest() != chosen[num_read]["digest"].tobytes():
                        break
                    num_read = num_read + 1
                    digest = new_digest()
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
    as long as their share, and that of unreadable files, is at most max_skipped.

    Raises DataError for unusable documents with "stop", for too many with "skip", and if no
    document is left.
    """
    on_error, max_skipped = rule
    tables = []
    skips = Skips()
    num_lost = 0
    sizes = [os.path.getsize(path) if os.path.exists(path) else 0 for path in files.paths]
    total = max(1, sum(sizes) // MEGABYTE)
    done = 0
    for file, size in enumerate(sizes):

        def on_bytes(count: int, before: int = done, size: int = size) -> None:
            progress("reading files (MB)", (before + min(count, size)) // MEGABYTE, total)

        table, file_skips = _indexed(FileReader(files, file), cache / "indexes", on_bytes, on_error)
        on_bytes(size)
        done += size
        table["file"] = file
        tables.append(table)
        skips.add_all(file_skips)
        if UNREADABLE in file_skips.counts:
            num_lost += 1
        if on_error == "stop" and len(skips.listed) == LISTED:
            break
    if skips.num_flawed and on_error == "stop":
        raise skips.stop("documents", sum(map(len, tables)), max_skipped)
    table = np.concatenate(tables)
    skips.check_share(num_lost, len(sizes) - num_lost, max_skipped, "files")
    skips.check_share(skips.num_flawed, len(table), max_skipped)
    if not len(table):
        more = f" and {len(files.names) - 1} more" if files.names[1:] else ""
        raise DataError(f"{files.names[0]}{more} has no text; use files with text")
    return Documents(files, table, skips)


def _scan(reader: FileReader, on_bytes: OnCount, on_error: str) -> tuple[np.ndarray, Skips]:
    """Return the table of a file's documents; call `on_bytes` with the bytes read so far."""
    table = bytearray()
    skips = Skips()
    num_bytes = 0
    for number, item in enumerate(reader.scan()):
        if isinstance(item, Flaw):
            # No document of a damaged file is used, not even those before the damage.
            dropped = 0 if item.row else len(table) // ENTRY.itemsize
            skips.add(reader.name, item, dropped)
            if not item.row:
                table.clear()
            if on_error == "stop" and len(skips.listed) == LISTED:
                break
            continue
        table += np.array((0, *item), ENTRY).tobytes()
        num_bytes += item[2]
        if number % ROWS_PER_CALL == 0:
            on_bytes(num_bytes)
    return np.frombuffer(table, ENTRY), skips


def _indexed(
    reader: FileReader, indexes: Path, on_bytes: OnCount, on_error: str
) -> tuple[np.ndarray, Skips]:
    """Return what `_scan` does, from the cache if the file has rows and is unchanged."""
    if reader.kind == "whole":
        return _scan(reader, on_bytes, on_error)
    index = indexes / f"{_signature(reader)}.npz"
    if saved := load_index(index):
        counts, listed = json.loads(str(saved["skips"]))
        return saved["table"], Skips(Counter(counts), listed)
    table, skips = _scan(reader, on_bytes, on_error)
    # Do not save an incomplete table, nor read errors, which may be temporary.
    has_stopped = on_error == "stop" and skips.num_flawed > 0
    is_whole = not has_stopped and not skips.counts[UNREADABLE]
    if is_whole and index.stem == _signature(reader):
        packed = json.dumps([skips.counts, skips.listed])
        save_index(index, {"table": table, "skips": np.array(packed)})
    return table, skips


def _signature(reader: FileReader) -> str:
    parts = [INDEX_FORMAT, reader.kind, os.path.realpath(reader.path), reader.field, reader.rows]
    return digest_of(*parts, reader.max_line_bytes, *state_of(reader.path))
