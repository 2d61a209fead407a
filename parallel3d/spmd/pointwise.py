"""Rules of pointwise operators, with broadcasting (floor 4)."""

from collections.abc import Sequence

from parallel3d.spmd.call import Call, Operand, Rule
from parallel3d.spmd.kinds import (
    MASKED,
    PARTIAL,
    REPLICATED,
    ZERO,
    Bounds,
    Cut,
    Gathered,
    Kind,
    LocalIds,
    Mark,
    Mismatch,
    NoRule,
    Partial,
    PerRank,
    Picked,
    Random,
    Replicated,
    Zero,
)


def aligned(operands: Sequence[Operand], ndim: int) -> Kind:
    """What operands give that are replicated or cut, each element with its counterpart.

    Mismatch where one rank's part meets another's, or the whole.
    """
    marks = {
        _shifted(o.kind.mark, len(o.shape), ndim): o for o in operands if isinstance(o.kind, Cut)
    }
    if len(marks) > 1:
        said = " and ".join(str(o.kind) for o in marks.values())
        raise Mismatch(f"puts together values that are {said}")
    wholes = [o for o in operands if isinstance(o.kind, Replicated)]
    if not marks:
        if any(isinstance(o.kind, Random) for o in operands):
            if all(o.kind == ZERO or len(o.shape) == 0 for o in wholes):
                return Random()
            raise Mismatch("draws other numbers on each rank for a value that is replicated")
        free = {_free(o, ndim) for o in wholes if len(o.shape) == ndim}
        return Replicated(free.pop()) if len(free) == 1 else REPLICATED
    mark = next(iter(marks))
    for o in wholes:
        dim = mark.dim - ndim + len(o.shape)
        if dim >= 0 and o.shape[dim] > 1 and _free(o, ndim) != mark:
            raise Mismatch(
                f"puts together a value that is {marks[mark].kind} and one that is whole there "
                f"(dim {dim}, {o.shape[dim]} elements): each rank's part needs its own part of it"
            )
    return Cut(mark)


def _shifted(mark: Mark, ndim: int, result: int) -> Mark:
    return Mark(mark.dim + result - ndim, mark.runs)


def _free(o: Operand, ndim: int) -> Mark | None:
    assert isinstance(o.kind, Replicated)
    return _shifted(o.kind.free, len(o.shape), ndim) if o.kind.free else None


def _split(call: Call) -> tuple[list[Operand], list[Operand]]:
    """Its operands that are partial, and the others."""
    partial: list[Operand] = []
    others: list[Operand] = []
    for o in call.tensors():
        if isinstance(o.kind, Gathered | Picked | LocalIds):
            raise Mismatch(f"takes {o.kind}")
        if isinstance(o.kind, Bounds):
            raise NoRule
        (partial if isinstance(o.kind, Partial) else others).append(o)
    return partial, others


def nonlinear(call: Call) -> Kind:
    """Rule of f(x, y, ...) of no known form: it takes nothing that is partial."""
    partial, others = _split(call)
    if call.differs():
        raise Mismatch("computes with a number that differs between the ranks")
    if partial:
        raise Mismatch(f"is not linear, and takes a value that is {partial[0].kind}")
    return aligned(others, len(call.shapes[0]))


def unary(call: Call) -> Kind:
    """Rule of a copy, a cast or a factor that all ranks have: the operand's kind is kept."""
    if call.differs():
        raise Mismatch("computes with a number that differs between the ranks")
    operand = call.tensors()[0]
    if isinstance(operand.kind, Bounds):
        if call.op not in ("neg", "mul"):
            return operand.kind
        if operand.kind.side != "inside":
            raise Mismatch(f"counts with {operand.kind}")
        return MASKED
    return operand.kind


def add(call: Call) -> Kind:
    """Rule of a sum or difference: of partial values alone, or of none."""
    first, second = call.arg(0), call.arg(1)
    if isinstance(second, PerRank) and isinstance(first, Operand):
        if call.op == "sub" and isinstance(first.kind, Replicated):
            return LocalIds(tuple(second))
        raise Mismatch("computes with a number that differs between the ranks")
    partial, others = _split(call)
    if not partial:
        return aligned([o for o in others if o.kind != ZERO] or others, len(call.shapes[0]))
    if isinstance(second, int | float) and second == 0:
        return partial[0].kind
    whole = [o for o in others if not isinstance(o.kind, Zero)]
    if whole or not isinstance(second, Operand):
        said = whole[0].kind if whole else "a number"
        raise Mismatch(f"adds {said} to a value that is {partial[0].kind}: tp times too much of it")
    kinds = {o.kind for o in partial}
    if any(isinstance(k, Partial) and k.op == "max" for k in kinds):
        raise Mismatch(f"adds to a value that is {partial[0].kind}")
    return kinds.pop() if len(kinds) == 1 and not others else PARTIAL


def multiply(call: Call) -> Kind:
    """Rule of a product: of at most one partial value, with replicated ones."""
    if not isinstance(call.arg(1), Operand):
        return unary(call)
    kinds = [o.kind for o in call.tensors()]
    for kind, other in (kinds, kinds[::-1]):
        if isinstance(kind, Picked) and isinstance(other, Bounds):
            return _masked(kind, other, "inside")
    return _linear_in(call, range(len(kinds)))


def divide(call: Call) -> Kind:
    """Rule of a quotient, which is linear in its dividend."""
    return _linear_in(call, (0,)) if isinstance(call.arg(1), Operand) else unary(call)


def backward_of_pointwise(call: Call) -> Kind:
    """Rule of a pointwise backward: a gradient, its first operand, times a function."""
    return _linear_in(call, (0,))


def _linear_in(call: Call, which: Sequence[int]) -> Kind:
    partial, others = _split(call)
    if not partial:
        return aligned(others, len(call.shapes[0]))
    allowed = [call.tensors()[i] for i in which]
    if len(partial) > 1 or partial[0] not in allowed:
        raise Mismatch(f"is not linear in a value that is {partial[0].kind}")
    if isinstance(partial[0].kind, Partial) and partial[0].kind.op == "max":
        raise Mismatch(f"computes with a value that is {partial[0].kind}")
    if any(isinstance(o.kind, Cut | Random) for o in others):
        other = next(o for o in others if isinstance(o.kind, Cut | Random))
        said = f"a value that is {partial[0].kind} with one that is {other.kind}"
        raise Mismatch(f"multiplies {said}")
    return partial[0].kind


def masked_fill(call: Call) -> Kind:
    """Rule of a fill: zeros, or another number, where a mask says so."""
    x, mask, value = call.args[:3]
    if isinstance(value, Operand):
        value = 0 if value.kind == ZERO else None
    if not isinstance(mask.kind, Bounds):
        if isinstance(x.kind, Partial) and value != 0:
            raise Mismatch(f"writes a number into a value that is {x.kind}")
        if isinstance(x.kind, Partial | LocalIds | Picked):
            return x.kind
        return aligned([x, mask], len(call.shapes[0]))
    if value != 0:
        raise Mismatch(f"writes {value} where {mask.kind} says so")
    return _masked(x.kind, mask.kind, "outside")


def _masked(kind: Kind, mask: Bounds, side: str) -> Kind:
    if mask.side != side:
        raise Mismatch(f"keeps the wrong elements: it takes {mask}")
    if isinstance(kind, LocalIds | Picked) and kind.first != mask.first:
        raise Mismatch(f"masks ids from {mask.first} on that are counted from {kind.first}")
    if isinstance(kind, LocalIds):
        return LocalIds(kind.first, True)
    if isinstance(kind, Picked | Replicated) or kind == MASKED:
        return MASKED
    raise NoRule


def where(call: Call) -> Kind:
    """Rule of a choice: one operand or the other, as a condition says."""
    condition, x, y = call.args[:3]
    if isinstance(condition.kind, Bounds):
        if x.kind == ZERO:
            return _masked(y.kind, condition.kind, "outside")
        if y.kind == ZERO:
            return _masked(x.kind, condition.kind, "inside")
        raise NoRule
    if any(isinstance(o.kind, Partial) for o in (x, y)):
        if all(isinstance(o.kind, Partial | Zero) for o in (x, y)):
            return PARTIAL
        raise Mismatch("chooses between a value that is partial and one that is not")
    return nonlinear(call)


_BOUND = {"lt": ("below", 0), "le": ("below", 1), "ge": ("above", 0), "gt": ("above", 1)}


def compare(call: Call) -> Kind:
    """Rule of a comparison; with a number of each rank's own, a bound of its ids."""
    x, y = call.args[:2]
    if not isinstance(y, PerRank):
        return nonlinear(call)
    if call.op not in _BOUND or not isinstance(x.kind, Replicated):
        raise Mismatch("compares with a number that differs between the ranks")
    side, more = _BOUND[call.op]
    ends = tuple(n + more for n in y)
    return Bounds("below", first=ends) if side == "below" else Bounds("above", stop=ends)


def logical(call: Call) -> Kind:
    """Rule of or, and, not of masks."""
    kinds = [o.kind for o in call.tensors()]
    bounds = [k for k in kinds if isinstance(k, Bounds)]
    if not bounds:
        return nonlinear(call)
    if len(bounds) != len(kinds):
        raise NoRule
    sides = {k.side: k for k in bounds}
    other = {"outside": "inside", "inside": "outside"}
    if len(kinds) == 1 and bounds[0].side in other:
        return Bounds(other[bounds[0].side], bounds[0].first, bounds[0].stop)  # type: ignore[arg-type]
    if "or" in call.op and sides.keys() == {"below", "above"}:
        return Bounds("outside", sides["below"].first, sides["above"].stop)
    if "and" in call.op and sides.keys() == {"below", "above"}:
        # Not below the first, not above the last: x >= first and x < stop.
        return Bounds("inside", sides["above"].stop, sides["below"].first)
    raise NoRule


def draw(call: Call) -> Kind:
    """Rule of random numbers in place of what was there: other numbers for each rank's seed."""
    seeds = call.kwargs["seed"]
    return Random() if any(isinstance(s, PerRank) for s in seeds) else REPLICATED


def dropout(call: Call) -> Kind:
    """Rule of native_dropout, whose mask must be cut as its input is."""
    x = call.tensors()[0]
    mask = Operand(draw(call), x.shape)
    if isinstance(x.kind, Partial):
        if isinstance(mask.kind, Random):
            raise Mismatch(f"drops other elements on each rank of a value that is {x.kind}")
        return x.kind
    return aligned([x, mask], len(x.shape))


_UNARY = ("clone", "_to_copy", "detach", "alias", "neg", "positive", "lift_fresh", "contiguous")
RULES: dict[str, Rule] = {
    **dict.fromkeys(_UNARY, unary),
    **dict.fromkeys(("add", "sub", "rsub"), add),
    "mul": multiply,
    **dict.fromkeys(("div", "true_divide"), divide),
    "masked_fill": masked_fill,
    "where": where,
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne"), compare),
    **dict.fromkeys(
        ("bitwise_or", "bitwise_and", "bitwise_not", "logical_or", "logical_and", "logical_not"),
        logical,
    ),
    **dict.fromkeys(("bernoulli", "uniform", "normal", "rand_like", "rand"), draw),
    "native_dropout": dropout,
    "native_dropout_backward": multiply,
}
