"""Boxes: what flat ranges of a tensor are in its own coordinates, against numpy."""

from itertools import combinations
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.checkpoint import chunks as module
from parallel3d.checkpoint.chunks import Box, boxes_of, inside, overlap, overlapping, shift

pytestmark = pytest.mark.gloo

shapes = st.lists(st.integers(0, 6), max_size=4)


@st.composite
def ranges(draw):
    shape = draw(shapes)
    start = draw(st.integers(0, prod(shape)))
    return shape, start, draw(st.integers(start, prod(shape)))


@st.composite
def boxes(draw, ndim):
    offsets = tuple(draw(st.integers(0, 6)) for _ in range(ndim))
    return Box(offsets, tuple(draw(st.integers(1, 4)) for _ in range(ndim)))


def slices(box):
    ends = map(sum, zip(*box, strict=True))
    return tuple(slice(start, end) for start, end in zip(box.offsets, ends, strict=True))


def elements(box, size=12):
    taken = np.zeros([size] * len(box.shape), bool)
    taken[slices(box)] = True
    return taken


@settings(deadline=None)
@given(ranges())
def test_boxes_tile_a_flat_range_in_order(case):
    shape, start, stop = case
    indices = np.arange(prod(shape)).reshape(shape)
    found = boxes_of(shape, start, stop)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    at = start
    for box, first in found:
        part = indices[slices(box)]
        assert part.shape == box.shape and part.size == box.numel > 0
        assert first == at - start
        assert part.flatten().tolist() == list(range(at, at + box.numel)), "contiguous, in order"
        at += box.numel
    assert at == stop


@settings(deadline=None)
@given(st.data(), st.integers(0, 3))
def test_overlap_is_what_both_have(data, ndim):
    a, b = data.draw(boxes(ndim)), data.draw(boxes(ndim))
    common = elements(a) & elements(b)
    found = overlap(a, b)
    assert (found is None) == (not common.any())
    if found is not None:
        assert (elements(found) == common).all()
        assert inside(found, a) and inside(found, b)
    assert inside(a, b) == bool((elements(b) | ~elements(a)).all())


@settings(deadline=None)
@given(st.data(), st.integers(0, 3))
def test_overlapping_finds_a_pair_where_there_is_one(data, ndim):
    several = data.draw(st.lists(boxes(ndim), max_size=7))
    pairs = [pair for pair in combinations(several, 2) if overlap(*pair)]
    found = overlapping(several)
    assert (found is None) == (not pairs)
    assert found is None or overlap(*found)


def test_parts_of_a_tensor_are_not_compared_in_pairs():
    """Cut 16-fold across a row, and each part's elements over 256 ranks: 20 000 boxes."""
    rows, columns, parts = 512, 4096, 16
    width = columns // parts
    share = rows * width // 256 + 7
    several = [
        shift(box, (0, part * width))
        for part in range(parts)
        for start in range(0, rows * width, share)
        for box, _ in boxes_of((rows, width), start, min(start + share, rows * width))
    ]
    assert len(several) > 10_000 and sum(box.numel for box in several) == rows * columns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "overlap", None)  # no two are compared
        assert overlapping(several) is None
    assert overlapping([*several, Box((100, 100), (1, 1))]) is not None
