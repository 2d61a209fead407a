"""The output projection and its cross-entropy as one function, computed in chunks of tokens.

The logits of all tokens, a model's largest tensor, never exist at once if there are several chunks.
Backward then recomputes the logits of each, which adds a third to the head's products.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from parallel3d.model.transformer_cost import chunk_tokens
from parallel3d.tensor.collectives import Context, all_gather_sequence, all_reduce, sum_copy
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.cross_entropy import Passes, gradient_of, sum_rows
from parallel3d.tensor.cut import even_split
from parallel3d.tensor.weight_gradients import (
    Factors,
    compute_or_defer,
    in_place_sum,
    sum_in_fp32,
    sums_in_fp32,
)

_ROWS = 2**25  # elements of a weight's gradient that are added at a time if dtypes differ


_hits: list[Tensor] | None = None


@contextmanager
def watch_hits() -> Iterator[list[Tensor]]:
    """Collect, for each loss inside, True where the label is the likeliest token: [...] as labels.

    Of tokens that are equally likely, each is the likeliest.
    """
    global _hits
    assert _hits is None
    _hits = []
    try:
        yield _hits
    finally:
        _hits = None


def local_ids(tokens: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return token ids relative to `start`, and a mask of those outside [start, stop).

    Ids outside become 0.
    """
    outside = (tokens < start) | (tokens >= stop)
    return (tokens - start).masked_fill(outside, 0), outside


class _Loss(torch.autograd.Function):
    """-log softmax(cap(x @ W^T + b)) at the label, in fp32; bias and cap are optional.

    | pass | result | collective |
    |---|---|---|
    | forward | loss of each token, [batch, seq] | all-reduces of [tokens] |
    | gradient of the input | (p - label) @ W -> [..., seq, size] | all-reduce |
    | gradient of the weight | (p - label)^T @ x -> [vocab / tp, size] | none |
    | gradient of the bias | sum of p - label -> [vocab / tp] | none |

    The slope of a cap multiplies p - label.

    The all-reduces of the forward carry one number per token: the maximum, the label's logit, the
    sum of exponentials. Under sequence parallelism x and its gradient are [..., seq / tp, size]: x
    is gathered in both passes, and the gradient reduced and scattered. The parameter itself is
    saved, as in the linear layers, because ZeRO-3 may release it before the backward.
    """

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        vocab_size: int,
        context: LayerContext,
        softcap: float | None,
    ) -> Tensor:
        """Return the loss of each label, [...] like `labels`."""
        group = context.group
        passes = Passes(context.pointwise, softcap)
        rows = _full_input(context, x)
        start, _ = even_split(vocab_size, group.size(), group.rank())  # the weight's first row
        # Of the group's largest slice of the vocabulary, so that all ranks use the same chunks.
        most_rows = -(-vocab_size // group.size())
        here, outside = local_ids(labels.flatten(), start, start + len(weight))
        parts = list(_parts(len(rows), most_rows))
        top, picked, total = torch.empty(3, len(rows), dtype=torch.float32, device=x.device)
        for part in parts:
            logits = _logits(rows[part], weight, bias, passes)
            sum_rows(logits, here[part], top[part], picked[part], total[part], passes)
            if len(parts) > 1:
                del logits  # before the next chunk's are computed
        context.note_part(top)
        highest = all_reduce(top, group, dist.ReduceOp.MAX)
        lower = top - highest
        picked = (picked + lower).masked_fill_(outside, 0.0)
        scale = lower.exp_()
        sums = torch.stack((total * scale, picked))
        context.note_part(sums)
        total, picked = all_reduce(sums, group)
        if _hits is not None:
            _hits.append((picked == 0).view(labels.shape))  # it is relative to the highest logit
        ctx.context = context
        ctx.weight = weight
        ctx.bias = bias
        ctx.passes = passes
        ctx.in_parts = len(parts) > 1
        ctx.most_rows = most_rows
        if ctx.in_parts:
            ctx.save_for_backward(x, weight, bias, here, outside, highest + total.log())
        elif any(ctx.needs_input_grad):
            gradient = gradient_of(logits, top, scale / total, here, outside, x.dtype, passes)
            ctx.save_for_backward(x, weight, gradient)
        return (total.log() - picked).view(labels.shape)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        backward = _in_parts if ctx.in_parts else _at_once
        grad_x, grad_weight, grad_bias = backward(ctx, grad.flatten().unsqueeze(-1))
        if grad_x is not None:
            grad_x = sum_copy(grad_x.view(*grad.shape, -1), ctx.context)
        return grad_x, grad_weight, grad_bias, None, None, None, None


def _at_once(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients by x, weight and bias from the saved gradient by the logits.

    `grad` [tokens, 1] is that by the losses. It multiplies tensors of the hidden size, not of the
    vocabulary's.
    """
    x, weight, gradient = ctx.saved_tensors
    grad_x = (gradient @ weight).mul_(grad) if ctx.needs_input_grad[0] else None
    grad_weight = None
    if ctx.needs_input_grad[1]:
        factors = Factors(gradient, lambda: _times(_full_input(ctx.context, x), grad), weight.shape)
        grad_weight = compute_or_defer(ctx.weight, lambda: gradient.t() @ factors.x(), factors)
    grad_bias = None
    if ctx.needs_input_grad[2]:
        grad_bias = _times(gradient, grad).sum(0, dtype=_sum_dtype(ctx.bias))
    return grad_x, grad_weight, _as_gradient(grad_bias, ctx.bias)


def _in_parts(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients by x, weight and bias, recomputing the logits of each chunk.

    `grad` [tokens, 1] is that by the losses. The weight's gradient cannot be deferred, because its
    factors are not kept.
    """
    x, weight, bias, here, outside, normaliser = ctx.saved_tensors
    rows = _full_input(ctx.context, x)
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    grad_x = torch.empty_like(rows) if needs_x else None
    sums = _sum_dtype(ctx.weight)
    grad_weight = None
    grad_bias = torch.zeros_like(bias, dtype=_sum_dtype(ctx.bias)) if needs_bias else None
    so_far = in_place_sum(ctx.weight) if needs_weight else None
    if so_far is not None and so_far.dtype == sums:
        grad_weight = so_far
    elif needs_weight:
        grad_weight = torch.empty_like(weight, dtype=sums)
    for part in _parts(len(rows), ctx.most_rows):
        logits = _logits(rows[part], weight, bias, ctx.passes)
        gradient = gradient_of(
            logits, normaliser[part], None, here[part], outside[part], x.dtype, ctx.passes
        )
        del logits  # in fp32 it is the same memory, in bf16 twice as much
        if grad_x is not None:
            torch.mul(gradient @ weight, grad[part], out=grad_x[part])
        if grad_weight is not None:
            factor = _times(rows[part], grad[part])
            _add_product(
                grad_weight, gradient, factor, first=part.start == 0 and so_far is not grad_weight
            )
        if grad_bias is not None:
            grad_bias += _times(gradient, grad[part]).sum(0, dtype=grad_bias.dtype)
        del gradient
    if grad_weight is so_far:
        grad_weight = None
    return grad_x, _as_gradient(grad_weight, ctx.weight), _as_gradient(grad_bias, ctx.bias)


def _sum_dtype(parameter: Tensor) -> torch.dtype:
    """Return the type in which a gradient of the parameter is summed: at least fp32."""
    dtype = parameter.grad_dtype or parameter.dtype
    return torch.float32 if dtype.itemsize < 4 else dtype


def _as_gradient(total: Tensor | None, parameter: Tensor) -> Tensor | None:
    """Return a sum, if there is one, in the type of the parameter's gradients."""
    return None if total is None else total.to(parameter.grad_dtype or parameter.dtype)


def _parts(tokens: int, vocab: int) -> Iterator[slice]:
    step = chunk_tokens(tokens, vocab)
    return (slice(first, min(first + step, tokens)) for first in range(0, tokens, step))


def _full_input(context: LayerContext, x: Tensor) -> Tensor:
    """Return the input of all tokens, [tokens, size]."""
    whole = all_gather_sequence(x, context.group) if context.sequence_parallel else x
    return whole.flatten(0, -2)


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None, passes: Passes) -> Tensor:
    """Return this rank's logits in their own memory: [tokens, size] -> [tokens, vocab / tp].

    They are not capped yet, and in fp32 unless the passes over them are compiled.
    """
    logits = F.linear(rows, weight, bias)
    return logits if passes.compiled else logits.float()


def _times(rows: Tensor, grad: Tensor) -> Tensor:
    """Return rows * grad, rounded once to the dtype of `rows`.

    Rounding `grad` first would scale all rows of a token by the same error.
    """
    return torch.mul(rows, grad, out=torch.empty_like(rows))


def _add_product(total: Tensor, gradient: Tensor, x: Tensor, first: bool) -> None:
    """Add gradient^T x to `total` [out, in]; if `first`, write it. In pieces if dtypes differ."""
    if total.dtype == x.dtype:
        torch.addmm(total, gradient.t(), x, beta=0 if first else 1, out=total)
        return
    if sums_in_fp32(x.device, x.dtype, total.dtype):
        sum_in_fp32(total.zero_() if first else total, gradient.t(), x)
        return
    step = max(1, _ROWS // total.shape[1])
    for start in range(0, len(total), step):
        rows = slice(start, start + step)
        product = gradient[:, rows].t() @ x
        total[rows].copy_(product) if first else total[rows].add_(product)


def vocab_parallel_loss(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    context: LayerContext,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return each token's cross-entropy in nats, in fp32, of the logits x @ weight.T + bias.

    - `x`: [..., size], replicated over the group, or this rank's part of the sequence.
    - `weight`: [vocab / tp, size], this rank's slice of a vocabulary of `vocab_size`.
    - `labels`: [...], global token ids. The loss of an id outside the vocabulary is meaningless.
    - `context`: its group cuts the vocabulary; with `pointwise` the passes over the logits are
      compiled.
    - `bias`: [vocab / tp], cut like the weight's rows.
    - `softcap`: c, if the logits become c tanh(logits / c) (arXiv:2408.00118, section 2).

    The result is [...], the same on each rank of the group.
    """
    return _Loss.apply(x, weight, bias, labels, vocab_size, context, softcap)
