"""Clipping was done by parameter group, each with a norm of its own, instead of once for
the model.
"""

from typing import Any

import torch

from parallel3d.engine.engine import Engine
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2019-05-15",
    "huggingface/transformers#614",
    mesh=(1, 1, 1),
    needs=("clipping", "ZeRO below 3", "no offload"),
)


@in_place_of(Engine, "step")
def plant(original: Any, engine: Engine, lr: float, *rest: Any) -> Any:
    """The reported norm is right; what each group is divided by is its own."""
    optimizer = engine.deepspeed.optimizer
    clip = type(optimizer).unscale_and_clip_grads

    def by_group(grads: list[torch.Tensor], norm: Any) -> None:
        own = torch.stack([grad.norm() for grad in grads]).norm()
        clip(optimizer, grads, own)

    optimizer.unscale_and_clip_grads = by_group
    return original(engine, lr, *rest)
