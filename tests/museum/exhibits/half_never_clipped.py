"""In half precision clipping looked for the gradients on the rounded parameters, and found none."""

from typing import Any

from parallel3d.engine.engine import Engine
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, needs=("bf16", "clipping"), kind="half")


@in_place_of(Engine, "step")
def plant(original: Any, engine: Engine, lr: float, *rest: Any) -> Any:
    """Nothing is clipped."""
    engine.deepspeed.optimizer.clip_grad = 0.0
    return original(engine, lr, *rest)
