"""The collectives of tensor parallelism, and those of sequence parallelism.

f and g of arXiv:1909.08053, section 3; under sequence parallelism an all-gather and a
reduce-scatter take their places (g and g-bar of arXiv:2205.05198, section 4.2.2).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_reduce(x: Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """The reduction of `x` over the group, in a new tensor (in `x` itself for a group of one)."""
    if group.size() == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op=op, group=group)
    return x


def all_gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The ranks' parts of a sequence, in order: [..., seq / tp, size] -> [..., seq, size]."""
    if group.size() == 1:
        return x
    parts = x.new_empty((group.size(), *x.shape))
    dist.all_gather_into_tensor(parts.view(-1), x.contiguous().view(-1), group=group)
    return parts.movedim(0, -3).flatten(-3, -2)


def reduce_scatter_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of the sum over the group: [..., seq, size] -> [..., seq / tp, size]."""
    if group.size() == 1:
        return x
    parts = x.unflatten(-2, (group.size(), -1)).movedim(-3, 0).contiguous()
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(mine.view(-1), parts.view(-1), group=group)
    return mine


def sequence_part(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """This rank's equal part of what every rank of the group holds whole, along `dim`."""
    length = x.shape[dim] // group.size()
    return x.narrow(dim, length * group.rank(), length)


class _F(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


class _G(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduce(x, group).view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        mine = reduce_scatter_sequence(x, group)
        return mine.view_as(mine)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather_sequence(grad, ctx.group), None


def copy_to_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """f: the identity forward, an all-reduce backward; where a replicated activation fans out."""
    result: Tensor = _F.apply(x, group)
    return result


def reduce_from_group(
    x: Tensor, group: dist.ProcessGroup, sequence_parallel: bool = False
) -> Tensor:
    """g: an all-reduce forward, the identity backward; where partial sums become replicated.

    Under sequence parallelism a reduce-scatter forward and an all-gather backward, which leaves
    each rank its part of the sequence: [..., seq, size] -> [..., seq / tp, size].
    """
    result: Tensor = (_ReduceScatter if sequence_parallel else _G).apply(x, group)
    return result
