"""The norm is right, and each stage clips by its own."""

from typing import Any

import torch

from parallel3d.engine.engine import Engine
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="",
    source="",
    what=(
        "The norm that was logged was the whole model's, and each pipeline stage clipped by "
        "its own."
    ),
    mesh=(4, 1, 1),
    needs=("clipping", "ZeRO below 3", "no offload"),
)


def plant() -> Planted:
    """A stage's gradients are divided by their own norm."""

    def step(original: Any, engine: Engine, lr: float) -> Any:
        optimizer = engine._deepspeed.optimizer
        clip = type(optimizer).unscale_and_clip_grads
        own = torch.zeros(())
        for group in optimizer.averaged_gradients.values():
            for gradient in group or ():
                own = own + gradient.detach().float().square().sum()

        optimizer.unscale_and_clip_grads = lambda grads, norm: clip(optimizer, grads, own.sqrt())
        return original(engine, lr)

    return wrapped(Engine, "step", step)
