"""Pointwise functions between products; each is one pass over memory if it is compiled."""

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.tensor.compiled import Pointwise


@Pointwise
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm of x [..., size] by weight and bias [size] -> [..., size]."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


@Pointwise
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [..., size] by weight [size] -> [..., size] (arXiv:1910.07467)."""
    return F.rms_norm(x, weight.shape, weight, eps)


@Pointwise
def swiglu(gate_up: Tensor) -> Tensor:
    """SwiGLU: SiLU of one half times the other, [..., 2 * size] -> [..., size] (2002.05202)."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@Pointwise
def gelu(x: Tensor, approximate: str) -> Tensor:
    """GELU of any shape -> the same; `approximate` is torch's: "none" or "tanh"."""
    return F.gelu(x, approximate=approximate)


@Pointwise
def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q, k [batch, heads, seq, head size] by angles with this cos, sin [..., seq, size]."""
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    size = cos.shape[-1]
    if x.shape[-1] > size:
        parts = _rotate(x[..., :size], cos, sin), x[..., size:]
        # Keep x's memory layout [batch, seq, heads, size]: attention's output then has it too, and
        # needs no copy.
        return torch.cat([part.transpose(1, 2) for part in parts], -1).transpose(1, 2)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def scale(x: Tensor, factor: float) -> Tensor:
    """Multiply x [...] by a factor; for a factor of 1 return `x` itself."""
    return x if factor == 1 else x * factor
