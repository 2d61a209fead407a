"""Rules of matrix products and attention (floor 4)."""

from parallel3d.spmd.call import Call, Operand, Rule
from parallel3d.spmd.kinds import (
    PARTIAL,
    REPLICATED,
    Cut,
    Gathered,
    Kind,
    Mark,
    Mismatch,
    NoRule,
    Partial,
    Replicated,
    Zero,
    cut,
)
from parallel3d.spmd.pointwise import add


def matmul(call: Call) -> Kind:
    """Rule of mm and bmm: [batch, m, k] x [batch, k, n]."""
    return _product(call.args[0], call.args[1], len(call.shapes[0]))


def addmm(call: Call) -> Kind:
    """Rule of a product and what is added to it."""
    bias, a, b = call.args[:3]
    shape = call.shapes[0]
    product = Operand(_product(a, b, len(shape)), shape)
    if call.kwargs.get("beta") == 0:
        return product.kind
    return add(Call("add", (bias, product), {}, call.shapes, call.tp))


def _product(a: Operand, b: Operand, ndim: int) -> Kind:
    for o, other in ((a, b), (b, a)):
        if isinstance(o.kind, Partial):
            if not isinstance(other.kind, Replicated | Zero):
                raise Mismatch(f"multiplies a value that is {o.kind} with one that is {other.kind}")
            return PARTIAL
        if isinstance(o.kind, Gathered):
            raise Mismatch(f"takes {o.kind}")
        if not isinstance(o.kind, Cut | Replicated | Zero):
            raise NoRule
    batch = ndim - 2
    # Which dim of each is the batch, the product's rows, what is summed, the columns.
    names_a = [*["batch"] * batch, "rows", "summed"]
    names_b = [*["batch"] * batch, "summed", "columns"]
    cut_a, cut_b = _named(a, names_a), _named(b, names_b)
    if cut_a and cut_b:
        if cut_a != cut_b:
            raise Mismatch(f"multiplies values that are {a.kind} and {b.kind}")
        return PARTIAL if cut_a[0] == "summed" else Cut(Mark(0, cut_a[1]))
    found = cut_a or cut_b
    if not found:
        return REPLICATED
    other, names = (b, names_b) if cut_a else (a, names_a)
    name, runs = found
    if name in ("summed", "batch") and not _is_free(other, names, name, runs):
        one = a if cut_a else b
        raise Mismatch(
            f"multiplies a value that is {one.kind} and one that is whole there: each rank's part "
            "needs its own part of it"
        )
    if name == "summed":
        return PARTIAL
    return cut({"batch": 0, "rows": batch, "columns": batch + 1}[name], runs)


def _named(o: Operand, names: list[str]) -> tuple[str, int] | None:
    return (names[o.kind.mark.dim], o.kind.mark.runs) if isinstance(o.kind, Cut) else None


def _is_free(o: Operand, names: list[str], name: str, runs: int) -> bool:
    """Whether it is constant along that cut, or has one element there."""
    free = o.kind.free if isinstance(o.kind, Replicated) else None
    if free and (names[free.dim], free.runs) == (name, runs):
        return True
    return o.shape[names.index(name)] == 1


def attention(call: Call) -> Kind | tuple[Kind, ...]:
    """Rule of fused attention [batch, heads, seq, size], forward or backward, along the heads."""
    operands = [o for o in call.tensors() if len(o.shape) == 4 and o.kind != Zero()]
    for o in operands:
        if isinstance(o.kind, Partial):
            raise Mismatch(f"is not linear, and takes a value that is {o.kind}")
        if isinstance(o.kind, Cut) and o.kind.mark.dim in (2, 3):
            raise Mismatch(f"attends within each rank's part alone: it takes a value {o.kind}")
    kinds = {o.kind if isinstance(o.kind, Cut) else REPLICATED for o in operands if o.shape[1] > 1}
    if len(kinds) > 1:
        raise Mismatch(f"takes values that are {' and '.join(sorted(map(str, kinds)))}")
    kind = kinds.pop() if kinds else REPLICATED
    return tuple(kind if len(shape) > 2 else REPLICATED for shape in call.shapes)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("mm", "bmm", "matmul"), matmul),
    **dict.fromkeys(("addmm", "baddbmm"), addmm),
}
