"""The place of a token that is copied to its experts was computed in an integer that is too small
for it, so long microbatches read other tokens.
"""

from typing import Any

import torch

from parallel3d.tensor import experts
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2026-04-21",
    "NVIDIA/TransformerEngine#2908",
    needs=("experts", "long"),
    kind="size",
)


@in_place_of(experts, "_scatter")
def plant(original: Any, x: torch.Tensor, order: torch.Tensor, k: int) -> Any:
    """Places have eight bits in place of 32."""
    return original(x, (order // k).to(torch.uint8).long(), 1)
