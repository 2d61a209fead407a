"""The collectives of tensor parallelism, and those of sequence parallelism.

g of arXiv:1909.08053, section 3 (its f is a part of `product.column_linear`); under sequence
parallelism an all-gather and a reduce-scatter (g and g-bar of arXiv:2205.05198, section 4.2.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.mesh.transfer import all_gather_single, reduce_scatter_single
from parallel3d.tensor.compiled import apart


@dataclass(frozen=True)
class Pending:
    """A collective that may still be under way; its result is valid once it was waited for."""

    result: Tensor
    works: Sequence[Any] = ()

    def wait(self) -> Tensor:
        """Return the result, which all that is computed, or queued, from here on may use."""
        for work in self.works:
            if work is not None:
                work.wait()
        return self.result


def all_reduce(x: Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Reduce `x` over the group into a new tensor (into `x` itself for a group of one)."""
    if group.size() == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op=op, group=group)
    return x


def start_all_reduce(x: Tensor, group: dist.ProcessGroup, later: bool = True) -> Pending:
    """Start to sum the contiguous `x` over the group, in place; unless `later`, it is then over."""
    if group.size() == 1:
        return Pending(x)
    return Pending(x, [dist.all_reduce(x, group=group, async_op=later)])


def start_all_gather(x: Tensor, group: dist.ProcessGroup, later: bool = True) -> Pending:
    """Start to gather a sequence's parts, in order: [..., seq / tp, size] -> [..., seq, size]."""
    if group.size() == 1:
        return Pending(x)
    whole = x.new_empty((*x.shape[:-2], x.shape[-2] * group.size(), x.shape[-1]))
    return Pending(whole, _each_sample(all_gather_single, whole, x.contiguous(), group, later))


def start_reduce_scatter(x: Tensor, group: dist.ProcessGroup, later: bool = True) -> Pending:
    """Start to sum and keep this rank's part: [..., seq, size] -> [..., seq / tp, size]."""
    if group.size() == 1:
        return Pending(x)
    mine = x.new_empty((*x.shape[:-2], x.shape[-2] // group.size(), x.shape[-1]))
    return Pending(mine, _each_sample(reduce_scatter_single, mine, x.contiguous(), group, later))


def _each_sample(
    collective: Any, out: Tensor, x: Tensor, group: dist.ProcessGroup, later: bool
) -> list[Any]:
    """Run one collective for each sample; return what to wait for, None for what is over.

    `out` and `x` are [..., seq or its part, size] and contiguous. One collective for all samples
    would leave the ranks' parts out of order: sorting them is a copy of the whole tensor. They are
    coalesced into one call, except over gloo: torch 2.13's gloo group corrupts the heap when such
    collectives end on both of its threads at once (benchmarks/upstream/gloo_coalesced.py).
    """
    outs, xs = (t.view(-1, t.shape[-2] * t.shape[-1]) for t in (out, x))
    if len(xs) == 1:
        return [collective(outs[0], xs[0], group=group, async_op=later)]
    if x.is_meta or dist.get_backend(group) == "gloo":  # torch cannot coalesce meta tensors
        return [
            collective(sample_out, sample, group=group, async_op=later)
            for sample_out, sample in zip(outs, xs, strict=True)
        ]
    with dist._coalescing_manager(group=group, async_ops=later) as together:
        for sample_out, sample in zip(outs, xs, strict=True):
            collective(sample_out, sample, group=group)
    return [together] if later else []


def all_gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the ranks' parts of a sequence: [..., seq / tp, size] -> [..., seq, size]."""
    return start_all_gather(x, group, later=False).result


def reduce_scatter_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over the ranks, keep this one's part: [..., seq, size] -> [..., seq / tp, size]."""
    return start_reduce_scatter(x, group, later=False).result


def sequence_part(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Take this rank's equal part, along `dim`, of what every rank of the group holds whole."""
    length = x.shape[dim] // group.size()
    return x.narrow(dim, length * group.rank(), length)


class _G(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        return start_all_reduce(x, group, later=False).result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather_sequence(grad, ctx.group), None


def reduce_from_group(
    x: Tensor, group: dist.ProcessGroup, sequence_parallel: bool = False
) -> Tensor:
    """Megatron's g: all-reduce forward, identity backward, where partial sums become replicated.

    The sum takes the place of `x`, which must be contiguous and held by nobody else. Under sequence
    parallelism a reduce-scatter and an all-gather: [..., seq, size] -> [..., seq / tp, size].
    """
    return x if group.size() == 1 else _across(x, group, sequence_parallel)


@apart("a collective of tensor parallelism")
def _across(x: Tensor, group: dist.ProcessGroup, sequence_parallel: bool) -> Tensor:
    return (_ReduceScatter if sequence_parallel else _G).apply(x, group)
