"""The norm that was logged was the whole model's, and each pipeline stage clipped by its own."""

from typing import Any

import torch

from parallel3d.engine.engine import Engine
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, mesh=(4, 1, 1), needs=("clipping", "ZeRO below 3", "no offload"))


@in_place_of(Engine, "step")
def plant(original: Any, engine: Engine, lr: float, *rest: Any) -> Any:
    """A stage's gradients are divided by their own norm."""
    optimizer = engine.deepspeed.optimizer
    clip = type(optimizer).unscale_and_clip_grads
    own = torch.zeros(())
    for group in optimizer.averaged_gradients.values():
        for gradient in group or ():
            own = own + gradient.detach().float().square().sum()

    def clip_by_own_norm(grads: Any, norm: Any) -> None:
        clip(optimizer, grads, own.sqrt())

    optimizer.unscale_and_clip_grads = clip_by_own_norm
    return original(engine, lr, *rest)
