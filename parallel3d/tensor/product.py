"""Products of activations with weights, as tensor-parallel layers need them: differentiable.

Their backward runs collectives under products, and makes gradients later that are held back.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from parallel3d.tensor.collectives import (
    Pending,
    all_gather_sequence,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from parallel3d.tensor.compiled import apart
from parallel3d.tensor.weight_gradients import is_holding_back, now_or_later


class _Linear(torch.autograd.Function):
    """x @ weight.T with the *parameter itself* saved for backward.

    torch saves a view of the weight, which holds on to its storage: under ZeRO-3 the gathered
    weights of the whole stage would live until the backward pass, although they are released.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight  # recomputation saves another tensor in its place
        return x @ weight.flatten(0, -2).t()  # [..., fused * out]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            shape = weight.shape
            grad_weight = now_or_later(ctx.weight, lambda: _weight_gradient(grad, x).view(shape))
        return grad_x, grad_weight


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Product of `x` [..., in] and `weight` [out, in] or [fused, out, in]: [..., fused * out]."""
    if torch.compiler.is_compiling():  # no weight is released, and no gradient held back
        return F.linear(x, weight.flatten(0, -2))
    return _Linear.apply(x, weight)


Rows = tuple[int, int] | None  # the rows [start, stop) of a weight that are used; None: all


class _ColumnLinear(torch.autograd.Function):
    """Several products with one input, which is f of tensor parallelism: one collective for all.

    Under sequence parallelism this rank's part of the input is saved, and gathered again in
    backward (arXiv:2205.05198, section 4.2.2). With overlap the gather runs under the product that
    makes the input's gradient, whose collective runs under those of the weights (as in
    Megatron-LM).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, sequence_parallel: bool, overlap: bool,
        rows: Sequence[Rows], *weights: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.save_for_backward(x, *weights)
        ctx.group, ctx.sequence_parallel, ctx.rows = group, sequence_parallel, rows
        ctx.weights, ctx.overlap = weights, overlap
        whole = all_gather_sequence(x, group) if sequence_parallel else x
        return tuple(whole @ _used(w, r).t() for w, r in zip(weights, rows, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients of the input and of each weight, from those of the outputs."""
        x, *weights = ctx.saved_tensors
        group, split, later = ctx.group, ctx.sequence_parallel, ctx.overlap
        needs_x, _, _, _, _, *needs_weights = ctx.needs_input_grad
        whole_x = cache(lambda: all_gather_sequence(x, group) if split else x)
        if split and later and any(needs_weights) and not is_holding_back():
            whole_x = cache(start_all_gather(x, group).wait)
        reduced: Pending | None = None
        if needs_x:
            start = start_reduce_scatter if split else start_all_reduce
            reduced = start(_input_gradient(grads, weights, ctx.rows), group, later)
        grad_weights = [
            now_or_later(parameter, partial(_gradient_of_rows, grad, whole_x, weight.shape, rows))
            if needs
            else None
            for needs, parameter, grad, weight, rows in zip(
                needs_weights, ctx.weights, grads, weights, ctx.rows, strict=True
            )
        ]
        return None if reduced is None else reduced.wait(), None, None, None, None, *grad_weights


def _input_gradient(
    grads: Sequence[Tensor], weights: Sequence[Tensor], rows: Sequence[Rows]
) -> Tensor:
    """This rank's share of the gradient of an input: the sum over its products, [..., in]."""
    first, *others = zip(grads, weights, rows, strict=True)
    total = first[0] @ _used(*first[1:])
    flat = total.flatten(0, -2)
    for grad, weight, used in others:  # each is added as it is made, without a place of its own
        torch.addmm(flat, grad.flatten(0, -2), _used(weight, used), out=flat)
    return total


def _used(weight: Tensor, rows: Rows) -> Tensor:
    """The matrix that takes part: [out, in]."""
    return weight.flatten(0, -2) if rows is None else weight[slice(*rows)]


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """[..., out] and [..., in] -> [out, in]."""
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


def _gradient_of_rows(
    grad: Tensor, x: Callable[[], Tensor], shape: torch.Size, rows: Rows
) -> Tensor:
    """The gradient of a weight of this shape, zero but for the rows that are used."""
    used = _weight_gradient(grad, x())
    if rows is None:
        return used.view(shape)
    padded = used.new_zeros(shape)
    padded[slice(*rows)] = used
    return padded


def column_linear(
    x: Tensor, weights: Sequence[Tensor], group: dist.ProcessGroup, sequence_parallel: bool = False,
    rows: Sequence[Rows] | None = None, overlap: bool = True,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Products of `x` with `weights` whose output features are cut over the group.

    x is replicated [..., in], or [..., seq / tp, in] under sequence parallelism; each result is
    [..., out] over the whole sequence. `rows`: the rows of each weight that this rank uses.
    """
    rows = rows or [None] * len(weights)
    if torch.compiler.is_compiling() and group.size() == 1:
        return tuple(linear(x, weight) for weight in weights)
    return _across(x, group, sequence_parallel, overlap, rows, *weights)


@apart("a collective of tensor parallelism")
def _across(*inputs: Any) -> tuple[Tensor, ...]:
    return _ColumnLinear.apply(*inputs)
