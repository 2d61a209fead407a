"""RMSNorm took the mean of squares in bf16, so that whole tokens were scaled wrongly."""

from typing import Any

from torch import Tensor

from parallel3d.tensor import norm
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, needs=("bf16", "rotary"), kind="half")


@in_place_of(norm.RMSNorm, "forward")
def plant(original: Any, self: norm.RMSNorm, x: Tensor) -> Tensor:
    """Mean and root have the type of the activations."""
    return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight
