"""Normalisation over activations that every tensor-parallel rank holds whole."""

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.tensor.cut import cut_of, cut_parameter


class LayerNorm(nn.Module):
    """LayerNorm over the last dim, whole on each rank of the group."""

    def __init__(self, size: int, group: dist.ProcessGroup, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = cut_parameter((size,), None, group)
        self.bias = cut_parameter((size,), None, group)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> [..., size]."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{cut_of(self.weight).global_shape}, replicated, eps={self.eps}"
