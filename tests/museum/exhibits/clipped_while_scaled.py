"""Gradients are clipped before the loss scale is taken out."""

from typing import Any

from parallel3d.engine.engine import Engine
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2023-11-04",
    source="milesial/Pytorch-UNet#468",
    what="Under fp16 the gradients were clipped while they were multiplied by the loss scale.",
    mesh=(1, 1, 1),
    needs=("clipping", "fp16"),
)


def plant() -> Planted:
    """The limit is compared with the scaled norm."""

    def step(original: Any, engine: Engine, lr: float) -> Any:
        optimizer, scale = engine._deepspeed.optimizer, engine.loss_scale
        limit, optimizer.clip_grad = optimizer.clip_grad, optimizer.clip_grad / scale
        result = original(engine, lr)
        optimizer.clip_grad = limit
        return result

    return wrapped(Engine, "step", step)
