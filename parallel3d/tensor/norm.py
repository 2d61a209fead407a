"""Normalisation over the last dim, which is not cut by tensor parallelism."""

from torch import Tensor

from parallel3d.tensor.collectives import sum_over_group
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.cut import CutModule, cut_parameter
from parallel3d.tensor.pointwise import layer_norm, rms_norm


class LayerNorm(CutModule):
    """LayerNorm over the last dim, with parameters that are not cut."""

    def __init__(self, size: int, eps: float, *, context: LayerContext) -> None:
        super().__init__()
        self.eps = eps
        self.function = layer_norm.compiled_if(context.pointwise)
        self.weight = cut_parameter((size,))
        self.bias = cut_parameter((size,))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> [..., size]."""
        return self.function(x, self.weight, self.bias, self.eps)


class RMSNorm(CutModule):
    """x / sqrt(mean(x^2) + eps) times a weight (arXiv:1910.07467), which is not cut."""

    def __init__(self, size: int, eps: float, *, context: LayerContext) -> None:
        super().__init__()
        self.eps = eps
        self.function = rms_norm.compiled_if(context.pointwise)
        self.weight = cut_parameter((size,))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> [..., size]."""
        return self.function(x, self.weight, self.eps)


class WidthNorm(CutModule):
    """RMSNorm over all heads together, which the group cuts; so is the weight.

    If there are fewer heads than ranks, each rank holds the whole weight and uses its head's part.
    """

    def __init__(self, heads: int, size: int, eps: float, *, context: LayerContext) -> None:
        super().__init__()
        group = context.group
        self.eps = eps
        self.context = context
        self.cut = heads >= group.size()
        self.weight = cut_parameter((heads * size,), tensor=(0, group) if self.cut else None)
        self.first = group.rank() * heads // group.size() * size

    def forward(self, x: Tensor) -> Tensor:
        """x [..., heads here, size] -> the same shape."""
        wide = x.flatten(-2).float()  # [..., heads here * size]
        own = wide.square().mean(-1, keepdim=True)
        mean = sum_over_group(own, self.context) / self.context.group.size()
        # The parameter itself where it can be: see `product.Product`.
        weight = self.weight if self.cut else self.weight.narrow(0, self.first, wide.shape[-1])
        return ((wide * (mean + self.eps).rsqrt()).to(x.dtype) * weight).view_as(x)
