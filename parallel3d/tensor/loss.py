"""The output projection and its cross-entropy as one function, some tokens at a time.

The logits of all tokens, a model's largest tensor, exist on no rank. Where there are several parts,
backward computes the logits of each again (a third of the head's products more).
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.model.head_cost import chunk_tokens
from parallel3d.tensor.collectives import all_gather_sequence, all_reduce, reduce_scatter_sequence
from parallel3d.tensor.cross_entropy import gradient_of, gradient_of_spent, ready, sum_rows
from parallel3d.tensor.cut import even_split
from parallel3d.tensor.weight_gradients import now_or_later, sum_so_far

_ROWS = 2**25  # elements of a weight's gradient that are made at once where they are added in fp32


def local_ids(tokens: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Token ids counted from `start`, and a mask of those outside [start, stop) (their id is 0)."""
    outside = (tokens < start) | (tokens >= stop)
    return (tokens - start).masked_fill(outside, 0), outside


class _Loss(torch.autograd.Function):
    """-log softmax at the label, of x @ weight.T, in fp32.

    All-reduces have one number a token (the maximum, the label's logit, the sum of exponentials).
    The parameter itself is saved, as by the linear layers: ZeRO-3 may release it meanwhile.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, start: int, most_rows: int,
        group: dist.ProcessGroup, sequence_parallel: bool,
    ) -> Tensor:  # fmt: skip
        """`start`: the token of the weight's first row; labels [...] -> [...].

        `most_rows`: of the largest slice; by it all ranks take the same tokens at a time.
        """
        rows = (all_gather_sequence(x, group) if sequence_parallel else x).flatten(0, -2)
        here, outside = local_ids(labels.flatten(), start, start + len(weight))
        parts = list(_parts(len(rows), most_rows))
        top, picked, total = torch.empty(3, len(rows), dtype=torch.float32, device=x.device)
        for part in parts:
            logits = _logits(rows[part], weight)
            sum_rows(logits, here[part], top[part], picked[part], total[part])
            if len(parts) > 1:
                del logits  # before there are the next part's
        highest = all_reduce(top, group, dist.ReduceOp.MAX)
        lower = top - highest
        picked = (picked + lower).masked_fill_(outside, 0.0)
        scale = lower.exp_()
        total, picked = all_reduce(torch.stack((total * scale, picked)), group)
        ctx.weight, ctx.group, ctx.sequence_parallel = weight, group, sequence_parallel
        ctx.in_parts, ctx.most_rows = len(parts) > 1, most_rows
        if ctx.in_parts:
            ctx.save_for_backward(x, weight, here, outside, highest + total.log())
        elif any(ctx.needs_input_grad):
            gradient = gradient_of_spent(logits, top, scale / total, here, outside, x.dtype)
            ctx.save_for_backward(x, weight, gradient)
        return (total.log() - picked).view(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, *tuple[None, ...]]:
        backward = _in_parts if ctx.in_parts else _at_once
        grad_x, grad_weight = backward(ctx, grad.flatten().unsqueeze(-1))
        if grad_x is not None:
            reduce = reduce_scatter_sequence if ctx.sequence_parallel else all_reduce
            shape = (*grad.shape, grad_x.shape[-1])
            grad_x = reduce(grad_x.view(shape), ctx.group)
        return grad_x, grad_weight, None, None, None, None, None


def _at_once(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of all tokens, by that of their logits; `grad` [tokens, 1] of their losses.

    What is multiplied by `grad` is of the hidden size, not of the vocabulary's.
    """
    x, weight, gradient = ctx.saved_tensors
    grad_x = (gradient @ weight).mul_(grad) if ctx.needs_input_grad[0] else None
    grad_weight = None
    if ctx.needs_input_grad[1]:

        def product() -> Tensor:
            return gradient.t() @ _times(_whole(ctx, x), grad)

        grad_weight = now_or_later(ctx.weight, product)
    return grad_x, grad_weight


def _in_parts(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The same with the logits computed again, part by part; `grad` [tokens, 1].

    The weight's gradient is not held back: what it would be made of later is what is not kept.
    """
    x, weight, here, outside, normaliser = ctx.saved_tensors
    rows = _whole(ctx, x)
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    grad_x = torch.empty_like(rows) if needs_x else None
    grad_dtype = ctx.weight.grad_dtype or weight.dtype
    sums = torch.float32 if grad_dtype.itemsize < 4 else grad_dtype
    grad_weight, so_far = None, sum_so_far(ctx.weight) if needs_weight else None
    if so_far is not None and so_far.dtype == sums:
        grad_weight = so_far
    elif needs_weight:
        grad_weight = torch.empty_like(weight, dtype=sums)
    for part in _parts(len(rows), ctx.most_rows):
        logits = _logits(rows[part], weight)
        gradient = gradient_of(logits, normaliser[part], here[part], outside[part], x.dtype)
        del logits  # the same memory in fp32, or twice as much
        if grad_x is not None:
            torch.mul(gradient @ weight, grad[part], out=grad_x[part])
        if grad_weight is not None:
            factor = _times(rows[part], grad[part])
            _add_product(
                grad_weight, gradient, factor, first=part.start == 0 and so_far is not grad_weight
            )
        del gradient
    if grad_weight is None or grad_weight is so_far:
        return grad_x, None
    return grad_x, grad_weight.to(grad_dtype)


def _parts(tokens: int, vocab: int) -> Iterator[slice]:
    step = chunk_tokens(tokens, vocab)
    return (slice(first, min(first + step, tokens)) for first in range(0, tokens, step))


def _whole(ctx: Any, x: Tensor) -> Tensor:
    """The input of all tokens, [tokens, size]."""
    return (all_gather_sequence(x, ctx.group) if ctx.sequence_parallel else x).flatten(0, -2)


def _logits(rows: Tensor, weight: Tensor) -> Tensor:
    """[tokens, size] -> this rank's, [tokens, vocab / tp], in memory of their own."""
    return ready(rows @ weight.t())


def _times(rows: Tensor, grad: Tensor) -> Tensor:
    """Rounded to the type of `rows` once, not `grad` before: one rounding of it bends all alike."""
    return torch.mul(rows, grad, out=torch.empty_like(rows))


def _add_product(total: Tensor, gradient: Tensor, x: Tensor, first: bool) -> None:
    """Add gradient^T x to `total` [out, in], or write it there; in pieces where types differ."""
    if total.dtype == x.dtype:
        torch.addmm(total, gradient.t(), x, beta=0 if first else 1, out=total)
        return
    step = max(1, _ROWS // total.shape[1])
    for start in range(0, len(total), step):
        rows = slice(start, start + step)
        product = gradient[:, rows].t() @ x
        total[rows].copy_(product) if first else total[rows].add_(product)


def vocab_parallel_loss(
    x: Tensor, weight: Tensor, labels: Tensor, *, vocab_size: int, group: dist.ProcessGroup,
    sequence_parallel: bool = False,
) -> Tensor:  # fmt: skip
    """The cross-entropy in nats of each token, in fp32, of the logits x @ weight.T.

    `x` [..., size], replicated over the group, or its part of the sequence; `weight` [vocab / tp,
    size] is this rank's slice of a vocabulary of `vocab_size`; `labels` [...] are global token ids.
    Returns [...], the same on each rank; for a label of no token a number without meaning.
    """
    start, stop = even_split(vocab_size, group.size(), group.rank())
    assert len(weight) == stop - start, (weight.shape, start, stop)
    most_rows = -(-vocab_size // group.size())
    return _Loss.apply(x, weight, labels, start, most_rows, group, sequence_parallel)
