"""Boxes: rectangular parts of tensors, the unit of checkpoints."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, combinations
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangular part of a tensor: its first element's index and its extent, dim by dim."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements in the box; 1 for a scalar."""
        return prod(self.shape)


def boxes_of(shape: Sequence[int], start: int, stop: int) -> list[tuple[Box, int]]:
    """Return the contiguous boxes that tile the flat range [start, stop) of a tensor, in order.

    Each comes with the index of its first element, counted from `start`. A tensor of n dims needs
    at most 2n - 1 boxes: per dim, the rest of a row, full rows, and the beginning of a row.
    """
    assert 0 <= start <= stop <= prod(shape), f"[{start}, {stop}) is not in a tensor of {shape}"
    boxes = _boxes(tuple(shape), start, stop)
    firsts = accumulate((box.numel for box in boxes), initial=0)
    return list(zip(boxes, firsts, strict=False))


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    row = shape[1:]
    size = prod(row)
    first, begin = divmod(start, size)  # the range skips `begin` elements of the first row
    last, end = divmod(stop, size)  # the range has `end` elements of the last row
    if first == last:
        return _in_row(first, _boxes(row, begin, end))
    boxes: list[Box] = []
    if begin:
        boxes += _in_row(first, _boxes(row, begin, size))
        first += 1
    if first < last:
        boxes.append(Box((first, *[0] * len(row)), (last - first, *row)))
    if end:
        boxes += _in_row(last, _boxes(row, 0, end))
    return boxes


def _in_row(row: int, boxes: list[Box]) -> list[Box]:
    return [Box((row, *box.offsets), (1, *box.shape)) for box in boxes]


def overlap(a: Box, b: Box) -> Box | None:
    """Return the box of the elements that two boxes share; None if there are none."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    shape = tuple(map(lambda x, y, at: min(x, y) - at, _ends(a), _ends(b), offsets))
    return Box(offsets, shape) if all(size > 0 for size in shape) else None


def shift(box: Box, offsets: Sequence[int]) -> Box:
    """Return the box moved by `offsets`, for example from a part's to the tensor's coordinates."""
    return Box(tuple(x + y for x, y in zip(box.offsets, offsets, strict=True)), box.shape)


def inside(box: Box, outer: Box) -> bool:
    """True if every element of `box` is in `outer`."""
    starts_inside = all(map(int.__ge__, box.offsets, outer.offsets))
    return starts_inside and all(map(int.__le__, _ends(box), _ends(outer)))


def overlapping(boxes: Iterable[Box]) -> tuple[Box, Box] | None:
    """Return two of the boxes that share an element, or None.

    Boxes that a plane separates are not compared with each other.
    """
    groups = [list(boxes)]
    while groups:
        group = groups.pop()
        dims = range(len(group[0].shape) if len(group) > 1 else 0)
        parts = next((p for p in (_separated(group, dim) for dim in dims) if len(p) > 1), None)
        if parts is not None:
            groups += parts
            continue
        for a, b in combinations(group, 2):
            if overlap(a, b) is not None:
                return a, b
    return None


def _separated(boxes: list[Box], dim: int) -> list[list[Box]]:
    """Return the boxes in groups that planes across `dim` separate."""
    parts: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        if box.offsets[dim] >= end:
            parts.append([])
        parts[-1].append(box)
        end = max(end, box.offsets[dim] + box.shape[dim])
    return parts


def _ends(box: Box) -> tuple[int, ...]:
    return tuple(map(int.__add__, box.offsets, box.shape))
