"""Normalisation over the last dim, which is not cut by tensor parallelism."""

from torch import Tensor, nn

from parallel3d.tensor.cut import cut_of, cut_parameter
from parallel3d.tensor.pointwise import layer_norm, rms_norm


class LayerNorm(nn.Module):
    """LayerNorm over the last dim, with parameters that are not cut."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = cut_parameter((size,))
        self.bias = cut_parameter((size,))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> [..., size]."""
        return layer_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{cut_of(self.weight).global_shape}, replicated, eps={self.eps}"


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) times a weight (arXiv:1910.07467), which is not cut."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = cut_parameter((size,))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> [..., size]."""
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{cut_of(self.weight).global_shape}, replicated, eps={self.eps}"
