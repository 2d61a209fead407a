"""GPT-2 with a router in each block that routes nothing: it only has side losses."""

from dataclasses import replace
from typing import Literal

from parallel3d.model.spec import Init, LayerSpec, ParamSpec
from parallel3d.models.gpt import spec as gpt

EXPERTS = 4
COEFFICIENTS = {"balance": 0.3, "z": 0.02, "largest": 0.0, "size": 0.05}


class Config(gpt.Config):
    """The settings of one model."""

    family: Literal["routed"]
    """The model family."""


def layers(config: Config) -> list[LayerSpec]:
    """Return embedding, blocks and head."""
    embedding, *blocks, head = gpt.layers(config)
    shape = EXPERTS, config.hidden_size
    router = ParamSpec("router.weight", shape, (), Init(std=0.3), True, role="hidden")
    return [
        embedding,
        *(
            replace(b, params=(*b.params, router), side_losses=("balance", "z", "largest"))
            for b in blocks
        ),
        replace(head, side_losses=("size",)),
    ]
