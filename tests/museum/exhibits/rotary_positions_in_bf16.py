"""Rotary positions were counted in bf16, which skips numbers above 256."""

from typing import Any

import torch

from parallel3d.tensor.rotary import Rotary
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, needs=("bf16", "rotary", "long"), kind="half")


@in_place_of(Rotary, "_tables_of")
def plant(original: Any, rotary: Rotary, x: torch.Tensor, seq: int) -> Any:
    """Positions have the type of the activations."""
    positions = torch.arange(seq).to(x.dtype).float()
    angles = torch.outer(positions, rotary.frequencies(x.device)).repeat(1, 2)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)
