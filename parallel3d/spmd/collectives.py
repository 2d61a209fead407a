"""Rules of collectives: what each turns a value into (floor 4)."""

from math import prod

from parallel3d.spmd.call import Operand
from parallel3d.spmd.kinds import (
    PARTIAL,
    REPLICATED,
    ZERO,
    Cut,
    Gathered,
    Kind,
    Mark,
    Mismatch,
    Partial,
    Picked,
    Replicated,
)
from parallel3d.spmd.marks import moved, through_view


def all_reduce(x: Operand, op: str) -> Kind:
    """Rule of an all-reduce: the sum (or maximum) that each rank then has."""
    if x.kind == ZERO:
        return ZERO
    if isinstance(x.kind, Partial) and x.kind.op == op:
        return REPLICATED
    if isinstance(x.kind, Replicated) and op in ("max", "min", "avg"):
        return REPLICATED
    if isinstance(x.kind, Replicated):
        raise Mismatch("sums what each rank has whole already: it becomes tp times as much")
    if isinstance(x.kind, Picked):
        raise Mismatch(f"sums {x.kind}")
    raise Mismatch(f"takes the {op} over the ranks of a value that is {x.kind}")


def all_gather(x: Operand, tp: int) -> Kind:
    """Rule of an all-gather: all ranks' parts in a dim of their own, flat [tp x elements]."""
    if x.kind == ZERO:
        return ZERO
    if not isinstance(x.kind, Cut):
        raise Mismatch(f"gathers a value that is {x.kind}")
    mark = through_view(x.kind.mark, x.shape, (prod(x.shape),))
    assert mark is not None
    return Gathered(Mark(0), Mark(0, mark.runs * tp))


def reduce_scatter(x: Operand, op: str, home: Mark | None, tp: int) -> Kind:
    """Rule of a reduce-scatter: each rank's part of the sum, flat; `home`: the parts' place."""
    if x.kind == ZERO:
        return ZERO
    if x.kind != PARTIAL and not (isinstance(x.kind, Partial) and x.kind.op == op):
        if isinstance(x.kind, Replicated):
            raise Mismatch("sums what each rank has whole already: it becomes tp times as much")
        raise Mismatch(f"sums over the ranks a value that is {x.kind}")
    if home is None or home.runs % tp:
        raise Mismatch("scatters what is not laid out as one part for each rank")
    return Cut(Mark(0, home.runs // tp))


def of_rows(name: str, x: Operand, op: str, tp: int, axis: str) -> Kind:
    """Rule of a collective of each row: [rows, elements] -> [rows, elements x or / tp]."""
    kind = x.kind
    if isinstance(kind, Cut):
        if kind.mark.dim == 0:
            if axis == "dp":
                return kind
            raise Mismatch(f"takes each row of a value that is {kind}")
        kind = Cut(Mark(0, kind.mark.runs))
    row = Operand(kind, x.shape[1:])
    if axis == "dp":
        found = across(name, row, tp)
    elif name == "all_gather":
        found = all_gather(row, tp)
    else:
        found = reduce_scatter(row, op, Mark(0, tp), tp)
    return moved(found, lambda m: Mark(m.dim + 1, m.runs), tp)


def across(name: str, x: Operand, tp: int) -> Kind:
    """Rule of a collective over tp of a value that is cut over dp: flat, each rank's own."""
    if not isinstance(x.kind, Cut):
        return x.kind
    mark = through_view(x.kind.mark, x.shape, (prod(x.shape),))
    assert mark is not None
    if name == "reduce_scatter" and mark.runs % tp:
        raise Mismatch("sums one sample's tokens with another's")
    runs = {"all_gather": mark.runs * tp, "reduce_scatter": mark.runs // tp}
    return Cut(Mark(0, runs.get(name, mark.runs)))
