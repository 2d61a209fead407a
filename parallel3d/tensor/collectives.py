"""The collectives of tensor and sequence parallelism.

Tensor parallelism uses g of arXiv:1909.08053, section 3 (f is part of `product.column_linear`).
Sequence parallelism uses an all-gather and a reduce-scatter (g and g-bar of arXiv:2205.05198,
section 4.2.2).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.mesh.transfer import all_gather_single, reduce_scatter_single
from parallel3d.tensor.compiled import graph_break
from parallel3d.tensor.context import LayerContext


@dataclass(frozen=True)
class Pending:
    """A collective that may still be running; `result` is valid after `wait`."""

    result: Tensor
    works: Sequence[Any] = ()  # None: it is over

    def wait(self) -> Tensor:
        """Wait for the collective and return its result; work queued afterwards may use it."""
        for work in self.works:
            if work is not None:
                work.wait()
        return self.result


def all_reduce(
    x: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """Reduce `x` over the group into a new tensor; for a group of one return `x` itself."""
    if group.size() == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op=op, group=group)
    return x


def start_all_reduce(x: Tensor, group: dist.ProcessGroup, async_op: bool = True) -> Pending:
    """Start to sum the contiguous `x` over the group, in place; finish unless `async_op`."""
    if group.size() == 1:
        return Pending(x)
    return Pending(x, [dist.all_reduce(x, group=group, async_op=async_op)])


def start_all_gather(x: Tensor, group: dist.ProcessGroup, async_op: bool = True) -> Pending:
    """Start to gather a sequence's parts in order: [..., seq / tp, size] -> [..., seq, size]."""
    if group.size() == 1:
        return Pending(x)
    full = x.new_empty((*x.shape[:-2], x.shape[-2] * group.size(), x.shape[-1]))
    return Pending(full, _each_sample(all_gather_single, full, x.contiguous(), group, async_op))


def start_reduce_scatter(x: Tensor, group: dist.ProcessGroup, async_op: bool) -> Pending:
    """Start to sum, keeping this rank's part: [..., seq, size] -> [..., seq / tp, size]."""
    if group.size() == 1:
        return Pending(x)
    part = x.new_empty((*x.shape[:-2], x.shape[-2] // group.size(), x.shape[-1]))
    return Pending(part, _each_sample(reduce_scatter_single, part, x.contiguous(), group, async_op))


def _each_sample(
    collective: Callable[..., Any],
    out: Tensor,
    x: Tensor,
    group: dist.ProcessGroup,
    async_op: bool,
) -> list[Any]:
    """Run one collective per sample; return the works to wait for (None if already finished).

    `out` and `x` are contiguous, [..., seq or its part, size]. One collective for all samples would
    leave the ranks' parts out of order, and sorting them would copy the whole tensor. The
    collectives are coalesced into one call, except over gloo: torch 2.13's gloo group corrupts the
    heap if coalesced collectives end on both of its threads at once
    (benchmarks/upstream/gloo_coalesced.py).
    """
    outs, xs = (t.view(-1, t.shape[-2] * t.shape[-1]) for t in (out, x))
    # torch cannot coalesce meta tensors.
    if len(xs) == 1 or x.is_meta or dist.get_backend(group) == "gloo":
        return [
            collective(sample_out, sample, group=group, async_op=async_op)
            for sample_out, sample in zip(outs, xs, strict=True)
        ]
    with dist._coalescing_manager(group=group, async_ops=async_op) as together:
        for sample_out, sample in zip(outs, xs, strict=True):
            collective(sample_out, sample, group=group)
    return [together] if async_op else []


def all_gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the ranks' parts of a sequence: [..., seq / tp, size] -> [..., seq, size]."""
    return start_all_gather(x, group, async_op=False).result


def reduce_scatter_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over the ranks, keeping this rank's part: [..., seq, size] -> [..., seq / tp, size]."""
    return start_reduce_scatter(x, group, async_op=False).result


def sequence_part(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Return this rank's equal part, along `dim`, of a tensor that is replicated over the group."""
    length = x.shape[dim] // group.size()
    return x.narrow(dim, length * group.rank(), length)


# torch's context of an autograd.Function, on which a forward sets attributes for its backward.
Context = Any


class Conjugate(torch.autograd.Function):
    """A function of a tensor whose backward is another function.

    That gets the gradient, and the tensors that are `kept` for it. A function that returns its
    argument has overwritten it.
    """

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        function: Callable[[Tensor], Tensor],
        of_gradient: Callable[..., Tensor],
        *kept: Tensor,
    ) -> Tensor:
        ctx.of_gradient = of_gradient
        ctx.save_for_backward(*kept)
        y = function(x)
        if y is x:
            ctx.mark_dirty(x)
        return y

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        return ctx.of_gradient(grad, *kept), None, None, *(None for _ in kept)


def reduce_from_group(x: Tensor, context: LayerContext) -> Tensor:
    """Sum partial results over the group (Megatron's g).

    | pass | replicated activations | sequence parallelism |
    |---|---|---|
    | forward | all-reduce, [..., seq, size] | reduce-scatter -> [..., seq / tp, size] |
    | backward | identity | all-gather -> [..., seq, size] |

    An all-reduce overwrites `x`, which must be contiguous and not used elsewhere.
    """
    if context.group.size() == 1:
        return x
    return _scatter_sum(x, context) if context.sequence_parallel else _sum_parts(x, context)


def sum_parts(x: Tensor, context: LayerContext) -> Tensor:
    """Sum over the group: all-reduce forward, identity backward, also under sequence parallelism.

    The sum overwrites `x`, as in `reduce_from_group`.
    """
    return x if context.group.size() == 1 else _sum_parts(x, context)


@graph_break("a collective of tensor parallelism")
def _sum_parts(x: Tensor, context: LayerContext) -> Tensor:
    return Conjugate.apply(x, partial(_sum_in_place, context=context), lambda grad: grad)


@graph_break("a collective of tensor parallelism")
def _scatter_sum(x: Tensor, context: LayerContext) -> Tensor:
    return Conjugate.apply(
        x,
        partial(sum_copy, context=context),
        lambda grad: all_gather_sequence(grad, context.group),
    )


@graph_break("a collective of tensor parallelism")
def copy_to_group(x: Tensor, context: LayerContext) -> Tensor:
    """Begin to compute parts of sums (Megatron's f).

    | pass | replicated activations | sequence parallelism |
    |---|---|---|
    | forward | identity, [..., seq, size] | all-gather -> [..., seq, size] |
    | backward | all-reduce | reduce-scatter -> [..., seq / tp, size] |
    """
    if context.group.size() == 1:
        return x

    def whole(x: Tensor) -> Tensor:
        if context.sequence_parallel:
            return all_gather_sequence(x, context.group)
        return x.view_as(x)

    return Conjugate.apply(x, whole, partial(sum_copy, context=context))


@graph_break("a collective of tensor parallelism")
def sum_over_group(x: Tensor, context: LayerContext) -> Tensor:
    """Sum over the group; each rank uses the sum for another part: all-reduce in both passes.

    The sum overwrites `x`, as in `reduce_from_group`.
    """
    if context.group.size() == 1:
        return x

    def sum_gradient(grad: Tensor) -> Tensor:
        context.note_part(grad)
        return all_reduce(grad, context.group)

    return Conjugate.apply(x, partial(_sum_in_place, context=context), sum_gradient)


def _sum_in_place(x: Tensor, context: LayerContext) -> Tensor:
    context.note_part(x)
    return start_all_reduce(x, context.group, async_op=False).result


def sum_copy(x: Tensor, context: LayerContext) -> Tensor:
    """Sum over the group into a new tensor; under sequence parallelism keep this rank's part."""
    context.note_part(x)
    if context.sequence_parallel:
        return reduce_scatter_sequence(x, context.group)
    return all_reduce(x, context.group)


@graph_break("a collective of context parallelism")
def mean_over_group(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the mean over the group, whose gradient is that of this rank's own `x`.

    For a loss whose gradients are averaged over the group: the mean of what each rank has of the
    gradient is then the whole one.
    """
    if group is None or group.size() == 1:
        return x
    own = x.detach()
    return x + (all_reduce(own, group) / group.size() - own)


def all_features(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the ranks' features: [..., size / tp] -> [..., size]; backward takes its own part."""
    if group.size() == 1:
        return x
    return Conjugate.apply(x, partial(_gathered, group=group), partial(_part, group=group))


def own_features(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Take this rank's features: [..., size] -> [..., size / tp]; backward gathers."""
    if group.size() == 1:
        return x
    return Conjugate.apply(x, partial(_part, group=group), partial(_gathered, group=group))


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [
        torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())
    ]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, -1)


def _part(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return sequence_part(x, group, -1).contiguous()


def all_tokens(x: Tensor, context: LayerContext) -> Tensor:
    """Gather a sequence that each rank then computes with as a whole; backward takes its part."""
    if not context.sequence_parallel or context.group.size() == 1:
        return x
    group = context.group
    gather = partial(all_gather_sequence, group=group)
    return Conjugate.apply(x, gather, lambda grad: sequence_part(grad, group, -2).contiguous())


def own_tokens(x: Tensor, context: LayerContext) -> Tensor:
    """Take this rank's part of a sequence that each rank has as a whole; backward gathers."""
    if not context.sequence_parallel or context.group.size() == 1:
        return x
    group = context.group
    gather = partial(all_gather_sequence, group=group)
    return Conjugate.apply(x, lambda x: sequence_part(x, group, -2).contiguous(), gather)
