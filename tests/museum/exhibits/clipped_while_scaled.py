"""Under fp16 the gradients were clipped while they were multiplied by the loss scale."""

from typing import Any

from parallel3d.engine.engine import Engine
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2023-11-04",
    "milesial/Pytorch-UNet#468",
    mesh=(1, 1, 1),
    needs=("clipping", "fp16"),
    kind="beside",
)


@in_place_of(Engine, "step")
def plant(original: Any, engine: Engine, lr: float, *rest: Any) -> Any:
    """The limit is compared with the scaled norm."""
    optimizer = engine.deepspeed.optimizer
    scale = engine.loss_scale
    limit = optimizer.clip_grad
    optimizer.clip_grad = optimizer.clip_grad / scale
    result = original(engine, lr, *rest)
    optimizer.clip_grad = limit
    return result
