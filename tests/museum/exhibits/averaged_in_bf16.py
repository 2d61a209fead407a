"""Gradients were averaged over data-parallel ranks in bf16 although fp32 was configured."""

import torch

from parallel3d.engine.engine_settings import EngineSettings
from tests.museum.exhibit import Exhibit, Planted, replaced

EXHIBIT = Exhibit(__doc__, mesh=(1, 4, 1), needs=("bf16",), kind="half")


def plant() -> Planted:
    """The type of the reduction is that of the parameters."""
    return replaced(EngineSettings, "reduction_dtype", property(lambda settings: torch.bfloat16))
