"""Where a cut goes when elements are moved: against the elements that ranks really have."""

import itertools

import pytest
import torch

from parallel3d.spmd.kinds import Mark
from parallel3d.spmd.marks import through_permute, through_view

pytestmark = pytest.mark.gloo

TP = 2


def part(whole, mark, rank):
    """A rank's elements of a whole tensor whose dim is cut so."""
    split = whole.unflatten(mark.dim, (mark.runs, TP, -1)).select(mark.dim + 1, rank)
    return split.flatten(mark.dim, mark.dim + 1)


def whole_of(shape, mark):
    sizes = list(shape)
    sizes[mark.dim] *= TP
    return torch.arange(torch.Size(sizes).numel()).view(sizes)


SHAPES = [(2, 4, 6), (8, 6), (2, 24), (48,), (2, 2, 2, 6), (2, 4, 3, 2), (2, 4, 2, 3)]


@pytest.mark.parametrize("old, new", list(itertools.permutations(SHAPES, 2)))
def test_through_a_view(old, new):
    for dim, size in enumerate(old):
        for runs in (r for r in range(1, size + 1) if size % r == 0):
            mark = Mark(dim, runs)
            whole, found = whole_of(old, mark), through_view(mark, old, new)
            if found is None:
                continue
            sizes = list(new)
            sizes[found.dim] *= TP
            for rank in range(TP):
                mine = part(whole, mark, rank).reshape(new)
                torch.testing.assert_close(mine, part(whole.reshape(sizes), found, rank))


def test_a_place_is_lost_only_where_a_view_tears_it():
    assert through_view(Mark(0), (6, 4), (4, 6)) == Mark(0)
    assert through_view(Mark(1), (2, 6), (3, 4)) is None
    assert through_view(Mark(1), (2, 6), (12,)) == Mark(0, 2)
    assert through_view(Mark(2), (2, 4, 1, 6), (2, 4, 6)) == Mark(2)
    assert through_view(Mark(2), (2, 4, 6), (2, 4, 1, 6)) == Mark(2)


def test_through_a_permutation():
    assert through_permute(Mark(1, 3), (2, 0, 1)) == Mark(2, 3)
    assert through_permute(Mark(2), (-1, 0, 1)) == Mark(0)
