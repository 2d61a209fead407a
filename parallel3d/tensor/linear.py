"""Linear layers whose weight is cut over a tensor-parallel group (arXiv:1909.08053, section 3)."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.tensor.collectives import copy_to_group, reduce_from_group
from parallel3d.tensor.cut import cut_of, cut_parameter


class _Linear(torch.autograd.Function):
    """x @ weight.T with the *parameter itself* saved for backward.

    torch saves a view of the weight, and a view holds on to its storage: under ZeRO-3 the gathered
    weights of the whole stage would then live until the backward pass, although the engine
    released them. A saved parameter is read again when it is gathered again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.flatten(0, -2).t()  # [..., fused * out]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        flat_grad = grad.flatten(0, -2)  # [tokens, fused * out]
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            grad_weight = (flat_grad.t() @ x.flatten(0, -2)).view(weight.shape)
        return grad_x, grad_weight


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x` [..., in] times `weight` [out, in] or [fused, out, in]: [..., fused * out]."""
    result: Tensor = _Linear.apply(x, weight)
    return result


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the output features cut over the group.

    Takes replicated x [..., in], gives this rank's [..., out / tp]. With `fused` = n the layer is n
    such layers side by side, each cut by itself (query, key and value): weight [n, out, in], result
    [..., n * out / tp], ordered layer by layer.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: dist.ProcessGroup,
        bias: bool = True,
        fused: int = 0,
    ) -> None:
        super().__init__()
        self.group = group
        layers = (fused,) if fused else ()
        dim = len(layers)
        self.weight = cut_parameter((*layers, out_features, in_features), dim, group)
        self.bias = cut_parameter((*layers, out_features), dim, group) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in], the same on each rank of the group -> [..., fused * out / tp]."""
        y = linear(copy_to_group(x, self.group), self.weight)
        return y if self.bias is None else y + self.bias.flatten()

    def extra_repr(self) -> str:
        return f"{cut_of(self.weight).global_shape}, columns / {self.group.size()}"


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the input features cut over the group.

    Takes this rank's x [..., in / tp], gives replicated [..., out]; the bias is whole on each rank
    and added once, after the sum.
    """

    def __init__(
        self, in_features: int, out_features: int, group: dist.ProcessGroup, bias: bool = True
    ) -> None:
        super().__init__()
        self.group = group
        self.weight = cut_parameter((out_features, in_features), 1, group)
        self.bias = cut_parameter((out_features,), None, group) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in / tp] -> [..., out], the same on each rank of the group."""
        y = reduce_from_group(linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"{cut_of(self.weight).global_shape}, rows / {self.group.size()}"
