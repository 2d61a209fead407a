"""A change to what is scaled in bf16 turned gradient clipping off, while the norm was still
reported.
"""

from typing import Any

from parallel3d.engine.engine import Engine
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__, "2023-06-22", "deepspeedai/DeepSpeed#3790", mesh=(1, 1, 1), needs=("clipping",)
)


@in_place_of(Engine, "step")
def plant(original: Any, engine: Engine, lr: float, *rest: Any) -> Any:
    """The optimizer's limit is 0, which means none."""
    engine.deepspeed.optimizer.clip_grad = 0.0
    return original(engine, lr, *rest)
