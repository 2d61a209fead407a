"""Clipping is configured and not done."""

from typing import Any

from parallel3d.engine.engine import Engine
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2023-06-22",
    source="deepspeedai/DeepSpeed#3790",
    what=(
        "A change to what is scaled in bf16 turned gradient clipping off, while the norm was "
        "still reported."
    ),
    mesh=(1, 1, 1),
    needs=("clipping",),
)


def plant() -> Planted:
    """The optimizer's limit is 0, which means none."""

    def step(original: Any, engine: Engine, lr: float) -> Any:
        engine._deepspeed.optimizer.clip_grad = 0.0
        return original(engine, lr)

    return wrapped(Engine, "step", step)
