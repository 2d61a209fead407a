"""Rules of operators that pick by ids: a vocabulary that is cut above all (floor 4)."""

from parallel3d.spmd.call import Call, Operand, Rule
from parallel3d.spmd.kinds import (
    MASKED,
    PARTIAL,
    REPLICATED,
    Bounds,
    Cut,
    Kind,
    LocalIds,
    Mismatch,
    NoRule,
    Partial,
    Picked,
    Replicated,
    Zero,
    cut,
)
from parallel3d.spmd.pointwise import aligned


def _check(ids: LocalIds) -> None:
    if not ids.bounded:
        raise Mismatch(f"picks by {ids}")


def embedding(call: Call) -> Kind:
    """Rule of an embedding: rows of a table, by ids."""
    table, ids = call.args[:2]
    if isinstance(ids.kind, LocalIds):
        _check(ids.kind)
        if table.kind != cut(0):
            raise Mismatch(f"picks by {ids.kind} from a table that is {table.kind}")
        return Picked(ids.kind.first)
    if table.kind == cut(0):
        raise Mismatch(f"picks by ids that are {ids.kind} from a table that is {table.kind}")
    if isinstance(table.kind, Replicated) and isinstance(ids.kind, Replicated | Cut):
        return ids.kind if isinstance(ids.kind, Cut) else REPLICATED
    if table.kind == cut(1) and isinstance(ids.kind, Replicated):
        return cut(len(ids.shape))
    raise NoRule


def embedding_backward(call: Call) -> Kind:
    """Rule of an embedding's backward: the gradient of the table."""
    grad, ids = call.args[:2]
    if isinstance(ids.kind, LocalIds):
        _check(ids.kind)
        if grad.kind == MASKED:
            return cut(0)
        raise Mismatch(f"gives rows of other ranks' ids a gradient, which is {grad.kind}")
    if isinstance(ids.kind, Cut):
        if grad.kind == ids.kind:
            return PARTIAL
        raise Mismatch(f"takes ids that are {ids.kind} and a gradient that is {grad.kind}")
    if isinstance(grad.kind, Cut):
        if grad.kind.mark.dim == len(grad.shape) - 1:
            return cut(1, grad.kind.mark.runs)
        raise Mismatch(f"takes ids that are {ids.kind} and a gradient that is {grad.kind}")
    kind: Kind = grad.kind
    return kind


def gather(call: Call) -> Kind:
    """Rule of a gather along a dim by ids; a dim that is cut takes the rank's own ids alone."""
    x, dim, ids = call.args[:3]
    dim %= len(x.shape)
    if isinstance(ids.kind, LocalIds):
        _check(ids.kind)
        if x.kind != cut(dim):
            raise Mismatch(f"picks by {ids.kind} from a value that is {x.kind}")
        return Picked(ids.kind.first)
    if isinstance(x.kind, Partial):
        return x.kind
    if isinstance(x.kind, Cut) and x.kind.mark.dim == dim:
        raise Mismatch(f"picks by ids that are {ids.kind} along a dim of which a rank has a part")
    return _alike(x, ids)


def _alike(x: Operand, ids: Operand) -> Kind:
    kinds = {o.kind for o in (x, ids) if isinstance(o.kind, Cut)}
    if not kinds:
        return REPLICATED
    if isinstance(x.kind, Cut) and x.kind == ids.kind:
        return x.kind
    raise Mismatch(f"picks by ids that are {ids.kind} from a value that is {x.kind}")


def scatter_add(call: Call) -> Kind:
    """Rule of adding elements along a dim at the places that ids name."""
    x, dim, ids, source = call.args[:4]
    dim %= len(x.shape)
    if isinstance(ids.kind, LocalIds):
        _check(ids.kind)
        if x.kind != cut(dim):
            raise Mismatch(f"adds at {ids.kind} to a value that is {x.kind}")
        hit = isinstance(source.kind, Bounds) and source.kind.side == "inside"
        if source.kind == MASKED or hit or isinstance(source.kind, Zero):
            return x.kind
        raise Mismatch(f"adds a value that is {source.kind} at other ranks' ids, too")
    if isinstance(x.kind, Cut) and x.kind.mark.dim == dim:
        raise Mismatch(f"adds at ids that are {ids.kind} along a dim of which a rank has a part")
    return aligned([x, ids, source], len(x.shape))


RULES: dict[str, Rule] = {
    "embedding": embedding,
    "embedding_dense_backward": embedding_backward,
    "gather": gather,
    "scatter_add": scatter_add,
}
