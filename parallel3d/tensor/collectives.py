"""The conjugate pair f and g of tensor parallelism (arXiv:1909.08053, section 3)."""

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


def copy_to_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """f: the identity forward, an all-reduce backward; where a replicated activation fans out."""
    result: Tensor = _F.apply(x, group)
    return result


def reduce_from_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """g: an all-reduce forward, the identity backward; where partial sums become replicated."""
    result: Tensor = _G.apply(x, group)
    return result
