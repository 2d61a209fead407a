"""Any decoder of transformers: its own config and names."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from parallel3d.models.pretrained import Part
from parallel3d.models.transformers.anatomy import settings_of, skeleton_of
from parallel3d.models.transformers.spec import Config

RUNS_TRANSFORMERS = True
"""The family runs the modules of transformers themselves."""
# Every folder has the names of the whole model.
PREFIX = ""
# Frequencies that old versions of transformers saved with the weights.
BUFFERS = re.compile(r".*rotary_emb\.inv_freq")


def architecture(config: Config, end_of_text: int | None = None, name: str | None = None) -> Any:
    """Return the transformers config; its `architectures` names the class.

    - `end_of_text`: the id of the token between documents.
    - `name`: the requested class, which must be the model's own.

    Raises ValueError for another class.
    """
    settings = settings_of(config.json_of_model)
    own = type(skeleton_of(config).model).__name__
    if name not in (None, own):
        raise ValueError(f"this model cannot be a {name}; use {own}")
    settings.architectures = [own]
    settings.bos_token_id = settings.eos_token_id = end_of_text
    return settings


def reference(config: Config) -> nn.Module:
    """Return the model of transformers in fp32, randomly initialised."""
    from transformers import AutoModelForCausalLM

    settings = settings_of(config.json_of_model)
    model: nn.Module = AutoModelForCausalLM.from_config(
        settings, attn_implementation="eager", experts_implementation="eager"
    )
    return model.float()


def to_huggingface(config: Config, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return full tensors under transformers' names, from those under our global names.

    Tensors are independent, so they may come one at a time.
    """
    shapes = skeleton_of(config).shapes
    found = {}
    for name, value in weights.items():
        own = name_of(config, name)
        found[own] = value.view(shapes[own])
    return found


def parts(config: Config, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
    """Return the tensor of transformers that holds one of our parameters, of this shape."""
    return (Part(name_of(config, name), shape, tuple(range(len(shape)))),)


def name_of(config: Config, name: str) -> str:
    """Return the name in transformers of a parameter."""
    skeleton = skeleton_of(config)
    base = f"{skeleton.prefix}." if skeleton.prefix else ""
    layer, _, own = name.partition(".")
    if layer == "embedding":
        child, _, leaf = own.partition(".")
        return f"{base}{child}.{leaf.removeprefix('table.')}"
    if layer == "blocks":
        number, _, leaf = own.partition(".")
        return f"{base}{skeleton.list}.{number}.{leaf.removeprefix('layer.')}"
    if own.startswith("tail."):
        return f"{base}{own.removeprefix('tail.')}"
    return f"{skeleton.output}.{own.removeprefix('output.')}"
