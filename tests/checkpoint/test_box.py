"""Boxes: what flat ranges of a tensor are in its own coordinates, against numpy."""

import time
from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.checkpoint.chunks import Box, boxes_of, shift, tile

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
    tiles = boxes_of(shape, start, stop)
    assert len(tiles) <= max(1, 2 * len(shape) - 1)
    at = start
    for box, first in tiles:
        part = indices[slices(box)]
        assert part.shape == box.shape and part.size == box.numel > 0
        assert first == at - start
        assert part.flatten().tolist() == list(range(at, at + box.numel)), "contiguous, in order"
        at += box.numel
    assert at == stop


@settings(deadline=None)
@given(st.data(), st.integers(0, 3))
def test_boxes_tile_a_tensor_if_each_element_is_in_exactly_one(data, ndim):
    shape = tuple(data.draw(st.integers(0, 3)) for _ in range(ndim))
    several = data.draw(st.lists(boxes(ndim), max_size=5))
    counts = sum((elements(box).astype(int) for box in several), np.zeros([12] * ndim, int))
    assert tile(several, shape) == np.array_equal(counts, elements(Box((0,) * ndim, shape)))


@settings(deadline=None)
@given(ranges(), st.data())
def test_boxes_of_consecutive_ranges_tile_a_tensor(case, data):
    """A missing box, one that is there twice, and one in another place are noticed."""
    shape, *cuts = case
    cuts = [0, *cuts, prod(shape)]
    several = [box for a, b in pairwise(cuts) for box, _ in boxes_of(shape, a, b)]
    assert tile(data.draw(st.permutations(several)), shape)
    if several:
        box = data.draw(st.sampled_from(several))
        assert not tile([*several, box], shape)
        several.remove(box)
        assert not tile(several, shape)
        if shape:
            assert not tile([*several, shift(box, (1,) * len(shape))], shape)
            assert not tile([*several, Box((*box.offsets, 0), (*box.shape, 1))], shape)


def test_checking_ten_thousand_boxes_is_fast():
    """Cut 16-fold across a row, and each part's elements over 256 ranks: 10 000 boxes."""
    rows = 512
    columns = 4096
    parts = 16
    width = columns // parts
    share = rows * width // 256 + 7
    several = []
    for part in range(parts):
        for start in range(0, rows * width, share):
            stop = min(start + share, rows * width)
            boxes_of_rank = boxes_of((rows, width), start, stop)
            several += [shift(box, (0, part * width)) for box, _ in boxes_of_rank]
    began = time.process_time()
    assert len(several) > 10_000 and tile(several, (rows, columns))
    assert time.process_time() - began < 1
    assert not tile([*several, Box((100, 100), (1, 1))], (rows, columns))
