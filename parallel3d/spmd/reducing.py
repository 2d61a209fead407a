"""Rules of operators that sum, or normalise, along dims (floor 4)."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

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
)
from parallel3d.spmd.pointwise import aligned


def _dims(call: Call, ndim: int) -> set[int]:
    dims = call.arg(1, call.kwargs.get("dim"))
    if dims is None or dims == ():
        return set(range(ndim))
    return {d % ndim for d in (dims if isinstance(dims, tuple) else (dims,))}


def reduce(call: Call) -> Kind:
    """Rule of sum, mean and amax along dims: a cut dim gives a partial sum, or maximum."""
    x = call.args[0]
    dims = _dims(call, len(x.shape))
    if isinstance(x.kind, Gathered):
        raise Mismatch(f"takes {x.kind}")
    if isinstance(x.kind, Partial):
        if call.op in ("sum", "mean") and x.kind.op == "sum":
            return PARTIAL
        raise Mismatch(f"is not linear, and takes a value that is {x.kind}")
    if isinstance(x.kind, Replicated):
        return REPLICATED
    if not isinstance(x.kind, Cut):
        raise NoRule
    mark = x.kind.mark
    if mark.dim in dims:
        if call.op in ("sum", "amax", "max"):
            return Partial("sum" if call.op == "sum" else "max")
        if call.op == "mean" and call.axis == "dp":  # over which the engine takes the mean
            return PARTIAL
        raise Mismatch(f"takes the {call.op} of each rank's part alone; the value is {x.kind}")
    kept = len(call.shapes[0]) == len(x.shape)
    return x.kind if kept else Cut(Mark(mark.dim - sum(d < mark.dim for d in dims), mark.runs))


def of_expanded(call: Call, expanded: Kind) -> Kind:
    """Kind of the gradient of an expanded value, which all ranks had and each used for its own.

    One element for all of a rank's own may be cut itself, or not: what was expanded tells.
    """
    x = call.args[0]
    if isinstance(expanded, Replicated) and isinstance(x.kind, Cut):
        dim = x.kind.mark.dim
        if dim in _dims(call, len(x.shape)) or x.shape[dim] == 1:
            return PARTIAL
    if isinstance(expanded, Cut) and isinstance(x.kind, Cut) and expanded != x.kind:
        # A single element of each rank, its only head, made as many: the cut lies before these.
        between = x.shape[expanded.mark.dim : x.kind.mark.dim]
        if prod(between) == 1 and expanded.mark.dim < x.kind.mark.dim:
            call = replace(call, args=(x._replace(kind=expanded), *call.args[1:]))
    return reduce(call)


def _along(x: Operand, dims: Sequence[int], of: str) -> Kind:
    if isinstance(x.kind, Partial):
        raise Mismatch(f"is not linear, and takes a value that is {x.kind}")
    if isinstance(x.kind, Cut) and x.kind.mark.dim in {d % len(x.shape) for d in dims}:
        raise Mismatch(f"takes {of} of each rank's part alone; the value is {x.kind}")
    return aligned([x], len(x.shape)) if isinstance(x.kind, Cut | Replicated) else x.kind


def softmax(call: Call) -> Kind:
    """Rule of a softmax, along a dim that is whole."""
    return _along(call.args[0], [call.args[1]], "the softmax")


def softmax_backward(call: Call) -> Kind:
    """Rule of a softmax's backward, linear in the gradient."""
    grad, output, dim = call.args[:3]
    of_output = _along(output, [dim], "the softmax")
    return _linear_in_gradient(grad, Operand(of_output, output.shape))


def triangle(call: Call) -> Kind:
    """Rule of tril and triu, of dims that are whole."""
    x = call.args[0]
    return x.kind if isinstance(x.kind, Partial) else _along(x, (-2, -1), "a triangle")


def _linear_in_gradient(grad: Operand, other: Operand) -> Kind:
    if isinstance(grad.kind, Partial):
        if isinstance(other.kind, Cut):
            raise Mismatch(f"takes a gradient that is {grad.kind} of a value that is {other.kind}")
        return PARTIAL
    return aligned([grad, other], len(grad.shape))


def norm(call: Call) -> tuple[Kind, ...]:
    """Rule of layer norm and RMS norm over the last dims, which must be whole."""
    x, shape = call.args[:2]
    kind = _along(x, range(-len(shape), 0), "the norm")
    for weight in call.args[2:4]:
        if isinstance(weight, Operand) and isinstance(weight.kind, Cut | Partial):
            raise Mismatch(f"takes a weight that is {weight.kind}")
    return (kind,) * len(call.shapes)


def norm_backward(call: Call) -> tuple[Kind, ...]:
    """Rule of a norm's backward: gradients of input and of weights, these over a rank's tokens."""
    grad, x, shape = call.args[:3]
    kind = _linear_in_gradient(grad, Operand(_along(x, range(-len(shape), 0), "the norm"), x.shape))
    of_weights = REPLICATED if isinstance(kind, Replicated) else PARTIAL
    return (kind, *[of_weights] * (len(call.shapes) - 1))


RULES: dict[str, Rule] = {
    **dict.fromkeys(("sum", "mean", "amax", "max", "amin", "logsumexp", "prod", "var"), reduce),
    **dict.fromkeys(("_softmax", "_safe_softmax", "_log_softmax", "cumsum", "cummax"), softmax),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), softmax_backward),
    **dict.fromkeys(("tril", "triu"), triangle),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), norm),
    **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), norm_backward),
}
