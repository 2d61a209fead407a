"""RMSNorm took the mean of the squares in bf16."""

from typing import Any

import torch

from parallel3d.tensor import norm
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, needs=("bf16", "rotary"), kind="half")


@in_place_of(norm, "rms_norm")
def plant(original: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Nothing is computed in fp32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
