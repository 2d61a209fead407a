"""Masters were truncated to bf16 instead of rounded to the nearest."""

from typing import Any

import torch

from parallel3d.engine.engine import Engine
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, needs=("bf16", "ZeRO-3"), kind="half")


@in_place_of(Engine, "step")
def plant(original: Any, engine: Engine, *args: Any) -> Any:
    """Cut the lower bits of the masters off."""
    outcome = original(engine, *args)
    zero = engine.deepspeed.optimizer
    for weights, master in zip(
        zero.fp16_partitioned_groups_flat, zero.fp32_partitioned_groups_flat, strict=True
    ):
        cut = (master.data.view(torch.int32) & -(2**16)).view(torch.float32)
        weights.data.copy_(cut.bfloat16())
    return outcome
