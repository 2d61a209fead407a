"""Differentiable products of activations with weights for tensor-parallel layers.

Their backward overlaps collectives with products, and can defer the weights' gradients
(weight_gradients.py).
"""

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.tensor.collectives import (
    Context,
    Pending,
    all_gather_sequence,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from parallel3d.tensor.compiled import graph_break
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.recompute import save, saved
from parallel3d.tensor.weight_gradients import Factors, compute_or_defer, is_deferring

Bilinear = Callable[[Tensor, Tensor], Tensor]


class Product(torch.autograd.Function):
    """A product of x and a weight with the *parameter itself* saved for backward.

    | pass | result | collective |
    |---|---|---|
    | forward | product(x, W): [..., in], [out, in] -> [..., out] | none |
    | gradient of the input | to_input(grad, W) -> [..., in] | none |
    | gradient of the weight | to_weight(grad, x) -> [out, in] | none |

    The shapes are those of a linear layer; experts have others. The weight's gradient may be
    deferred (weight_gradients.py).

    torch saves a view of the weight, which keeps its storage alive: under ZeRO-3 the gathered
    weights of the whole stage would stay in memory until the backward, although they are released.

    - `product`: multiplies x and the weight.
    - `to_input`, `to_weight`: compute a gradient from the output's gradient and the other factor;
      None for grad^T x.
    """

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        product: Bilinear,
        to_input: Bilinear,
        to_weight: Bilinear | None,
    ) -> Tensor:
        save(ctx, x, weight)
        ctx.weight = weight  # recomputation would save another tensor in its place
        ctx.to_input = to_input
        ctx.to_weight = to_weight
        return product(x, weight)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = saved(ctx)
        to_weight = ctx.to_weight
        shape = weight.shape
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.to_input(grad, weight).to(x.dtype)
        if ctx.needs_input_grad[1]:
            factors = None
            if to_weight is None:
                to_weight = _weight_gradient
                factors = Factors(grad, lambda: x.to(grad.dtype), shape)
            product = partial(_viewed, to_weight, grad, x, shape)
            grad_weight = compute_or_defer(ctx.weight, product, factors)
        return grad_x, grad_weight, None, None, None


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Multiply x [..., in] by weight [out, in] or [fused, out, in] -> [..., fused * out].

    The product is computed in `dtype`, or in that of x; its operands are saved as they are.
    """
    dtype = dtype or x.dtype
    # Blocks are compiled only where weights are not released or gradients deferred.
    if torch.compiler.is_compiling():
        return F.linear(x.to(dtype), weight.flatten(0, -2).to(dtype))
    return Product.apply(
        x,
        weight,
        lambda x, weight: x.to(dtype) @ weight.flatten(0, -2).t().to(dtype),
        lambda grad, weight: grad @ weight.flatten(0, -2).to(grad.dtype),
        None,
    )


def linear_of_rows(x: Tensor, weight: Tensor, rows: slice) -> Tensor:
    """Multiply x [..., in] by some rows of a weight [out, in] -> [..., rows]."""
    shape = weight.shape  # it may be released before its gradient is computed

    def to_weight(grad: Tensor, x: Tensor) -> Tensor:
        whole = grad.new_zeros(shape)
        whole[rows] = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        return whole

    return Product.apply(
        x,
        weight,
        lambda x, weight: x @ weight[rows].t(),
        lambda grad, weight: grad @ weight[rows],
        to_weight,
    )


Rows = tuple[int, int] | None  # the rows [start, stop) of a weight that are used; None: all


class _ColumnLinear(torch.autograd.Function):
    """Several products with one input (f of tensor parallelism), with one collective for all.

    | pass | result | sum or gather |
    |---|---|---|
    | forward | x @ W^T -> [..., seq, out / tp] for each weight | all-gather of x |
    | gradient of the input | sum of grad @ W -> [..., seq, in] | all-reduce or reduce-scatter |
    | gradient of a weight | grad^T @ x -> [out / tp, in] | all-gather of x |

    The gathers of x and the reduce-scatter are those of sequence parallelism, under which x and
    its gradient are [..., seq / tp, in]: only this rank's part of the input is saved, and gathered
    again in backward (arXiv:2205.05198, section 4.2.2). With `context.overlap`, that gather runs
    during the product for the input's gradient, and the collective of the input's gradient during
    the products for the weights' (as in Megatron-LM).
    """

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        context: LayerContext,
        rows: Sequence[Rows],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        save(ctx, x, *weights)
        ctx.context = context
        ctx.rows = rows
        ctx.weights = weights
        full_x = all_gather_sequence(x, context.group) if context.sequence_parallel else x
        return tuple(full_x @ _used(w, r).t() for w, r in zip(weights, rows, strict=True))

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients by the input and each weight from those by the outputs."""
        x, *weights = saved(ctx)
        context: LayerContext = ctx.context
        group = context.group
        split = context.sequence_parallel
        needs_x, _, _, *needs_weights = ctx.needs_input_grad
        full_x = cache(lambda: all_gather_sequence(x, group) if split else x)
        if split and context.overlap and any(needs_weights) and not is_deferring():
            full_x = cache(start_all_gather(x, group).wait)
        reduced: Pending | None = None
        if needs_x:
            reduced = _start_sum(_input_gradient(grads, weights, ctx.rows), context)
        grad_weights: list[Tensor | None] = []
        for needs, parameter, grad, weight, rows in zip(
            needs_weights, ctx.weights, grads, weights, ctx.rows, strict=True
        ):
            product = partial(_gradient_of_rows, grad, full_x, weight.shape, rows)
            used = None if rows is None else slice(*rows)
            factors = Factors(grad, full_x, weight.shape, used)
            grad_weights.append(compute_or_defer(parameter, product, factors) if needs else None)
        grad_x = None if reduced is None else reduced.wait()
        return grad_x, None, None, *grad_weights


def _start_sum(part: Tensor, context: LayerContext) -> Pending:
    """Start to sum the ranks' parts of an input's gradient, in place where it is replicated."""
    context.note_part(part)
    start = start_reduce_scatter if context.sequence_parallel else start_all_reduce
    return start(part, context.group, context.overlap)


def _input_gradient(
    grads: Sequence[Tensor], weights: Sequence[Tensor], rows: Sequence[Rows]
) -> Tensor:
    """Return this rank's share of the input's gradient, [..., in]: the sum over its products."""
    first, *others = zip(grads, weights, rows, strict=True)
    total = first[0] @ _used(*first[1:])
    flat = total.flatten(0, -2)
    for grad, weight, used in others:  # adds each product without a temporary tensor
        torch.addmm(flat, grad.flatten(0, -2), _used(weight, used), out=flat)
    return total


def _used(weight: Tensor, rows: Rows) -> Tensor:
    """Return the matrix of the rows that are used, [out, in]."""
    return weight.flatten(0, -2) if rows is None else weight[slice(*rows)]


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return grad^T x: [..., out] and [..., in] -> [out, in]."""
    return grad.flatten(0, -2).t() @ x.to(grad.dtype).flatten(0, -2)


def _viewed(to_weight: Bilinear, grad: Tensor, x: Tensor, shape: torch.Size) -> Tensor:
    return to_weight(grad, x).view(shape)


def _gradient_of_rows(
    grad: Tensor, x: Callable[[], Tensor], shape: torch.Size, rows: Rows
) -> Tensor:
    """Return the gradient of a weight of this shape, zero except in the rows that are used."""
    used = _weight_gradient(grad, x())
    if rows is None:
        return used.view(shape)
    padded = used.new_zeros(shape)
    padded[slice(*rows)] = used
    return padded


def column_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    context: LayerContext,
    rows: Sequence[Rows] | None = None,
) -> tuple[Tensor, ...]:
    """Multiply `x` by `weights` whose output features are cut over the context's group.

    - `x`: [..., in], replicated, or [..., seq / tp, in] under sequence parallelism.
    - `rows`: the rows of each weight that this rank uses; None means all.

    Return [..., out] over the full sequence for each weight.
    """
    rows = rows or [None] * len(weights)
    if torch.compiler.is_compiling() and context.group.size() == 1:
        return tuple(linear(x, weight) for weight in weights)
    return _across(x, context, rows, *weights)


@graph_break("a collective of tensor parallelism")
def _across(
    x: Tensor, context: LayerContext, rows: Sequence[Rows], *weights: Tensor
) -> tuple[Tensor, ...]:
    return _ColumnLinear.apply(x, context, rows, *weights)
