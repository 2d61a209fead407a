"""Rotary positions began again at 256."""

from typing import Any

import torch

from parallel3d.tensor.rotary import Rotary
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, needs=("rotary", "long"), kind="size")


@in_place_of(Rotary, "_tables_of")
def plant(original: Any, rotary: Rotary, x: torch.Tensor, seq: int) -> Any:
    """Positions have eight bits."""
    cos, sin = original(rotary, x, seq)
    positions = torch.arange(len(cos)) % 256
    return cos[positions], sin[positions]
