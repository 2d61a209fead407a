"""Ranges of bytes in files, joined where they are near each other."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

Data = TypeVar("Data", bytes, np.ndarray)  # of np.uint8

# What is read at once, at most.
MOST = 2**22


class Range(NamedTuple):
    """Bytes start .. end - 1 of a file."""

    path: str
    start: int
    end: int


def joined(ranges: Iterable[Range], gap: int) -> list[Range]:
    """Fewer ranges that cover all of the given ones, sorted, with up to `gap` bytes between two."""
    runs: list[Range] = []
    for path, start, end in sorted(set(ranges)):
        last = runs[-1] if runs else Range("", 0, 0)
        if last.path == path and start <= last.end + gap and end - last.start <= MOST:
            runs[-1] = last._replace(end=max(last.end, end))
        else:
            runs.append(Range(path, start, end))
    return runs


def gathered(
    ranges: Sequence[Range],
    gap: int,
    read: Callable[[Sequence[Range]], Sequence[Data]],
) -> list[Data]:
    """The bytes of each range, by one call of `read` for the joined ones."""
    runs = joined(ranges, gap)
    found = read(runs)
    whole = [bisect_right(runs, r._replace(end=r.end + MOST)) - 1 for r in ranges]
    return [
        found[i][r.start - runs[i].start : r.end - runs[i].start]
        for i, r in zip(whole, ranges, strict=True)
    ]
