"""How operators that only move elements take a cut along: from the old dims to the new."""

from collections.abc import Callable, Sequence
from math import prod

from parallel3d.spmd.kinds import (
    REPLICATED,
    Cut,
    Gathered,
    Kind,
    Mark,
    Mismatch,
    Replicated,
)

Shape = tuple[int, ...]
Move = Callable[[Mark], Mark | None]  # None: its place is lost


def through_view(mark: Mark, old: Shape, new: Shape) -> Mark | None:
    """Follow a mark through a view: the place in other dims of the same elements, in order."""
    parted = mark.runs == old[mark.dim] > 1 and new[mark.dim + 1 : mark.dim + 2] == (1,)
    if new[: mark.dim + 1] == old[: mark.dim + 1] and not parted:
        return mark
    before = prod(old[: mark.dim]) * mark.runs
    if mark == Mark(1) and old[1] == 1 and new == (old[0], *old[2:]):
        # One head a rank, put together with the batch: what a product of batches takes.
        return Mark(0, old[0])
    outer = 1
    for dim, size in enumerate(new):
        if outer == before and (outer > 1 or size > 1 or old[mark.dim] == 1):
            return Mark(dim)
        if outer < before < outer * size:
            fits = before % outer == 0 and outer * size % before == 0
            return Mark(dim, before // outer) if fits else None
        outer *= size
    return Mark(len(new) - 1, new[-1]) if new and outer == before else None


def through_permute(mark: Mark, dims: Sequence[int]) -> Mark:
    """Follow a mark through a permutation: dim `i` of the result is dim `dims[i]`."""
    order = [d % len(dims) for d in dims]
    return Mark(order.index(mark.dim), mark.runs)


def moved(kind: Kind, move: Move, tp: int) -> Kind:
    """The kind of the result of an operator that moves elements; Mismatch where a cut is torn."""
    if isinstance(kind, Cut):
        mark = move(kind.mark)
        if mark is None:
            raise Mismatch(f"takes a dim apart across its cut; the value is {kind}")
        return Cut(mark)
    if isinstance(kind, Replicated):
        return Replicated(move(kind.free)) if kind.free else REPLICATED
    if isinstance(kind, Gathered):
        ranks, home = move(kind.ranks), move(kind.home)
        if ranks is None or home is None:
            raise Mismatch(f"takes the ranks' parts apart; the value is {kind}")
        if ranks.dim == home.dim and home.runs == ranks.runs * tp:
            return REPLICATED
        return Gathered(ranks, home)
    return kind
