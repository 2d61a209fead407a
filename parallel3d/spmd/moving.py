"""Rules of operators that move elements, and compute nothing (floor 4)."""

from collections.abc import Sequence

from parallel3d.spmd.call import Call, Operand, Rule
from parallel3d.spmd.kinds import (
    EMPTY,
    PARTIAL,
    REPLICATED,
    UNKNOWN,
    ZERO,
    Cut,
    Gathered,
    Kind,
    Mark,
    Mismatch,
    NoRule,
    Partial,
    PerRank,
    Piece,
    Replicated,
    Zero,
    cut,
)
from parallel3d.spmd.marks import Move, moved, through_permute, through_view
from parallel3d.spmd.pointwise import aligned


def move_of(call: Call) -> Move | None:
    """How an operator that keeps all elements takes a mark along; None if it drops some."""
    shape, ndim = call.args[0].shape, len(call.args[0].shape)
    if call.op in ("view", "_unsafe_view", "reshape", "_reshape_alias", "squeeze"):
        return lambda mark: through_view(mark, shape, call.shapes[0])
    if call.op == "permute":
        return lambda mark: through_permute(mark, call.args[1])
    if call.op in ("transpose", "t"):
        a, b = (call.args[1] % ndim, call.args[2] % ndim) if call.op == "transpose" else (0, -1)
        dims = list(range(ndim))
        dims[a], dims[b] = dims[b], dims[a]
        return lambda mark: through_permute(mark, dims)
    if call.op == "unsqueeze":
        at = call.args[1] % (ndim + 1)
        return lambda mark: Mark(mark.dim + (mark.dim >= at), mark.runs)
    if call.op in ("clone", "contiguous", "_to_copy", "detach", "alias"):
        return lambda mark: mark
    return None


def _keep(call: Call) -> Kind:
    move = move_of(call)
    assert move is not None
    if call.op == "squeeze" and len(call.args) > 1:
        dims = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
        shape = call.args[0].shape
        gone = [d % len(shape) for d in dims if shape[d] == 1]

        def squeezed(mark: Mark) -> Mark | None:
            dim = mark.dim
            if dim in gone and shape[dim + 1 : dim + 2] == (1,):
                dim += 1  # of two dims of one element either is the cut one
            return None if dim in gone else Mark(dim - sum(d < dim for d in gone), mark.runs)

        return moved(call.args[0].kind, squeezed, call.tp)
    return moved(call.args[0].kind, move, call.tp)


def expand(call: Call) -> Kind:
    """Rule of an expansion: one element for many, of which each rank may take its own."""
    x, shape = call.args[0], call.shapes[0]
    more = len(shape) - len(x.shape)
    if isinstance(x.kind, Replicated):
        if x.kind.free is not None:
            return Replicated(Mark(x.kind.free.dim + more, x.kind.free.runs))
        grown = [d for d, size in enumerate(x.shape) if size == 1 < shape[d + more]]
        added = [d for d in range(more) if shape[d] > 1]
        places = [d + more for d in grown] + added
        return Replicated(Mark(places[0])) if places else REPLICATED
    return moved(x.kind, lambda mark: Mark(mark.dim + more, mark.runs), call.tp)


def taken(x: Operand, dim: int, start: int, stop: int, *, step: int = 1, axis: str = "tp") -> Kind:
    """Rule of taking elements start, start + step, ... of a dim of each rank's own tensor."""
    size = x.shape[dim]
    start, stop, _ = slice(start, stop).indices(size)
    if isinstance(x.kind, Gathered):
        if dim in (x.kind.ranks.dim, x.kind.home.dim):
            return UNKNOWN
        return x.kind
    if not isinstance(x.kind, Cut) or x.kind.mark.dim != dim or (start, stop, step) == (0, size, 1):
        if isinstance(x.kind, Replicated) and x.kind.free and x.kind.free.dim == dim:
            return REPLICATED
        return x.kind
    run = size // x.kind.mark.runs
    if step == 1 and start % run == 0 and (stop - start) % run == 0:
        return cut(dim, (stop - start) // run)
    if x.kind.mark.runs == 1 and start < step and stop == size and size % step == 0:
        return x.kind
    if axis == "dp":  # samples, of whose order nothing depends
        return cut(dim)
    if step == 1 and x.kind.mark.runs == 1:
        return Piece(x.kind, start, stop)
    raise Mismatch(
        f"takes elements {start} to {stop} of each rank's {size} of a dim that is cut, which are "
        "not those of one rank that holds it whole"
    )


def slice_(call: Call) -> Kind:
    """Rule of a slice; with bounds that differ between ranks, each rank's own part."""
    x, dim = call.args[0], call.arg(1, 0) % len(call.args[0].shape)
    start, stop, step = call.arg(2), call.arg(3), call.arg(4, 1)
    if isinstance(start, PerRank) or isinstance(stop, PerRank):
        if isinstance(x.kind, Replicated):
            return cut(dim)
        if isinstance(x.kind, Zero):
            return ZERO
        raise Mismatch(f"gives each rank its own part of a value that is {x.kind}")
    stop = x.shape[dim] if stop is None else stop
    return taken(x, dim, start or 0, stop, step=step, axis=call.axis)


def _pieces(call: Call) -> tuple[Kind, ...]:
    x, dim = call.args[0], call.arg(2, call.kwargs.get("dim", 0))
    dim, kinds, start = dim % len(x.shape), [], 0
    for shape in call.shapes:
        kinds.append(taken(x, dim, start, start + shape[dim], axis=call.axis))
        start += shape[dim]
    return tuple(kinds)


def select(call: Call) -> Kind:
    """Rule of a selection: one element of a dim, which goes; unbind takes each element so."""
    x, dim = call.args[0], call.arg(1, 0) % len(call.args[0].shape)
    if isinstance(call.arg(2), PerRank):
        raise NoRule
    if isinstance(x.kind, Cut) and x.kind.mark.dim == dim:
        if call.axis == "dp" and call.op == "unbind":  # each sample for itself
            return UNKNOWN
        raise Mismatch(f"takes one element of dim {dim}; the value is {x.kind}")
    if isinstance(x.kind, Gathered) and dim in (x.kind.ranks.dim, x.kind.home.dim):
        return UNKNOWN
    if isinstance(x.kind, Replicated) and x.kind.free and x.kind.free.dim == dim:
        return REPLICATED
    return moved(x.kind, lambda m: Mark(m.dim - (m.dim > dim), m.runs), call.tp)


def join(call: Call) -> Kind:
    """Rule of cat and stack: they join values of like kinds."""
    operands: Sequence[Operand] = call.args[0]
    is_stack, ndim = call.op == "stack", len(call.shapes[0])
    dim = call.arg(1, call.kwargs.get("dim", 0)) % ndim
    kinds = {o.kind for o in operands if o.kind != ZERO}
    if not kinds:
        return ZERO
    if any(isinstance(k, Partial) for k in kinds):
        if len({k.op if isinstance(k, Partial) else str(k) for k in kinds}) > 1:
            raise Mismatch(f"puts side by side values that are {' and '.join(map(str, kinds))}")
        return kinds.pop() if len(kinds) == 1 else PARTIAL
    if len(kinds) == 1 and not isinstance(next(iter(kinds)), Cut | Replicated):
        return kinds.pop()
    rest = [o for o in operands if o.kind != ZERO]
    marks = {o.kind.mark if isinstance(o.kind, Cut) else None for o in rest}
    if marks == {None}:
        return REPLICATED
    if len(marks) > 1:
        raise Mismatch(f"puts side by side values that are {' and '.join(map(str, kinds))}")
    mark = next(iter(marks))
    assert mark is not None
    if is_stack:
        return cut(mark.dim + (mark.dim >= dim), mark.runs)
    if mark.dim != dim:
        return Cut(mark)
    if len({o.shape[dim] for o in rest}) > 1:
        raise Mismatch("puts side by side parts of unequal sizes of dims that are cut")
    return cut(dim, mark.runs * len(rest))


def repeat(call: Call) -> Kind:
    """Rule of a repetition: copies side by side."""
    x = call.args[0]
    more, times = len(call.shapes[0]) - len(x.shape), call.args[1]
    kind = REPLICATED if isinstance(x.kind, Replicated) else x.kind
    return moved(
        kind, lambda m: Mark(m.dim + more, m.runs * int(times[m.dim + more])), call.tp
    )  # fmt: skip


def slice_backward(call: Call) -> Kind:
    """Rule of a slice's backward: a gradient put into zeros, at the slice's place."""
    x, shape, dim, start = call.args[:4]
    dim %= len(shape)
    if isinstance(start, PerRank) or isinstance(call.arg(4), PerRank):
        return placed(x.kind, dim)
    if isinstance(x.kind, Cut) and x.kind.mark.dim == dim:
        run = x.shape[dim] // x.kind.mark.runs
        if shape[dim] % run or start % run:
            raise NoRule
        return cut(dim, shape[dim] // run)
    return x.kind


def placed(kind: Kind, dim: int) -> Kind:
    """What the ranks' parts give together, each put into zeros at its rank's place."""
    if kind == cut(dim):
        return PARTIAL
    raise Mismatch(f"puts a value that is {kind} at a place that differs between the ranks")


def select_backward(call: Call) -> Kind:
    """Rule of a selection's backward: a gradient put into zeros, at one place of a new dim."""
    dim = call.args[2] % len(call.args[1])
    return moved(call.args[0].kind, lambda m: Mark(m.dim + (m.dim >= dim), m.runs), call.tp)


def copy(call: Call) -> Kind:
    """Rule of a copy: the kind of its source, if the target has its shape, or a broadcast one."""
    target, source = call.args[:2]
    if isinstance(source.kind, Cut | Replicated) and len(source.shape) <= len(target.shape):
        return aligned([source], len(target.shape))
    kind: Kind = source.kind
    return kind


def _created(call: Call) -> Kind:
    if call.op.endswith("zeros") or call.op.endswith("zeros_like") or call.op == "zero":
        return ZERO
    if "empty" in call.op:
        return EMPTY
    if call.op == "arange":
        return cut(0) if call.differs() else REPLICATED
    if call.differs():
        raise Mismatch("makes a value of a number that differs between the ranks")
    is_zero = call.op in ("scalar_tensor", "full", "fill") and call.args[-1] == 0
    return ZERO if is_zero else REPLICATED


_KEEPING = ("view", "_unsafe_view", "reshape", "_reshape_alias", "squeeze")
_CREATED = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
RULES: dict[str, Rule] = {
    **dict.fromkeys((*_KEEPING, "permute", "transpose", "t", "unsqueeze"), _keep),
    **dict.fromkeys((*_CREATED, "zeros", "zeros_like", "new_zeros", "zero"), _created),
    **dict.fromkeys(("ones", "ones_like", "new_ones", "scalar_tensor", "full"), _created),
    **dict.fromkeys(("full_like", "new_full", "arange", "fill"), _created),
    "expand": expand,
    "slice": slice_,
    **dict.fromkeys(("split", "split_with_sizes"), _pieces),
    **dict.fromkeys(("select", "unbind"), select),
    **dict.fromkeys(("cat", "stack"), join),
    "repeat": repeat,
    "slice_backward": slice_backward,
    "select_backward": select_backward,
    "copy": copy,
}
