"""Any decoder of transformers: its own config and names."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.models.pretrained import Part
from parallel3d.models.transformers.anatomy import settings_of, skeleton_of
from parallel3d.models.transformers.regions import LayerPlan, Place
from parallel3d.models.transformers.skeleton import biases_of
from parallel3d.models.transformers.spec import Config

RUNS_TRANSFORMERS = True
"""The family runs the modules of transformers themselves."""
# Every folder has the names of the whole model.
PREFIX = ""
# The output projection of GPT-NeoX has two names in files.
OTHER_NAMES = {"lm_head.weight": "embed_out.weight"}
# Frequencies and GPT-NeoX's masks, which old versions of transformers saved with the weights.
BUFFERS = re.compile(r".*rotary_emb\.inv_freq|(gpt_neox\.)?layers\.\d+\.attention\.(masked_)?bias")


def architecture(config: Config, end_of_text: int | None = None, name: str | None = None) -> Any:
    """Return the transformers config; its `architectures` names the class.

    - `end_of_text`: the id of the token between documents.
    - `name`: the requested class, which must be the model's own.

    Raises ValueError for another class.
    """
    settings = settings_of(config.json_of_model)
    skeleton = skeleton_of(config)
    own = type(skeleton.model).__name__
    if name not in (None, own):
        raise ValueError(f"this model cannot be a {name}; use {own}")
    if skeleton.constants:
        raise ValueError(f"it has the buffer {skeleton.constants[0]}, which no checkpoint has")
    settings.use_cache = json.loads(config.config).get("use_cache", True)
    settings.architectures = [own]
    settings.bos_token_id = settings.eos_token_id = end_of_text
    return settings


def reference(config: Config) -> nn.Module:
    """Return the model of transformers in fp32, randomly initialised.

    Biases of experts' scores are parameters in it, as they are in ours.
    """
    from transformers import AutoModelForCausalLM

    settings = settings_of(config.json_of_model)
    # Else what a module computes as it is built has the type that a published file names.
    model: nn.Module = AutoModelForCausalLM.from_config(
        settings,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    skeleton = skeleton_of(config)
    for number in range(len(skeleton.layers)):
        layer = model.get_submodule(f"{skeleton.prefix}.{skeleton.list}.{number}".removeprefix("."))
        for owner in layer.modules():
            for name, bias in biases_of(owner).items():
                delattr(owner, name)
                owner.register_parameter(name, nn.Parameter(bias))
    return model.float()


def to_huggingface(config: Config, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return full tensors under transformers' names, from those under our global names.

    Tensors are independent, so they may come one at a time.
    """
    shapes = skeleton_of(config).shapes
    found = {}
    for name, value in weights.items():
        own = name_of(config, name)
        found[own] = _in_their_order(config, own, value, shapes[own])
    return found


@lru_cache(maxsize=16)
def _orders(config: Config) -> dict[str, Place]:
    """Return the places of parameters whose elements have another order than in transformers."""
    skeleton = skeleton_of(config)
    found = {}
    for number, layer in enumerate(skeleton.layers):
        plan = LayerPlan(skeleton, number)
        for name, _ in layer.named_parameters():
            place = plan.place(name)
            if place.heads is not None or place.turned:
                found[name_of(config, f"blocks.{number}.layer.{name}")] = place
    return found


def _in_their_order(config: Config, name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a parameter with transformers' shape and order, under whose name it is."""
    place = _orders(config).get(name)
    if place is not None and place.heads is not None:
        order = place.heads.order
        places = torch.tensor(order, device=value.device).argsort()
        value = value.unflatten(0, (len(order), -1)).index_select(0, places)
    if place is not None and place.turned:
        return value.reshape(*shape[:-2], shape[-1], shape[-2]).mT.contiguous()
    return value.view(shape)


def to_files(config: Config, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that `save_pretrained` writes for them: each expert has its own."""
    shapes = skeleton_of(config).shapes
    found = {}
    for name, value in weights.items():
        for part in parts(config, name, tuple(value.shape)):
            own = value[part.index]
            if not part.index:
                whole = name_of(config, name)
                own = _in_their_order(config, whole, value, shapes[whole])
            found[part.name] = own
    return found


def packed(config: Config, name: str, shape: tuple[int, ...]) -> Part:
    """Return the tensor of the model itself that holds a parameter; files may have it, too."""
    own = name_of(config, name)
    dims = tuple(range(len(shape)))
    place = _orders(config).get(own)
    if place is None:
        return Part(own, shape, dims)
    if place.heads is not None:
        return Part(own, shape, dims, blocks=place.heads.order)
    stack = len(skeleton_of(config).shapes[own]) - 2
    turned = (*shape[:stack], shape[-1], *shape[stack:-1])
    return Part(own, turned, (*dims[:stack], *dims[stack + 1 :], stack))


@lru_cache(maxsize=2**16)
def parts(config: Config, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
    """Return the tensors in files that hold one of our parameters, of this shape.

    They are found by trying what transformers makes of a small parameter as it saves it. Where that
    is no slice of it, the file has the model's own tensor, which transformers loads as well.
    """
    whole = packed(config, name, shape)
    if whole.name in _orders(config):
        return (whole,)
    skeleton = skeleton_of(config)
    own = skeleton.shapes[whole.name]
    try:
        saved = skeleton.saved({whole.name: torch.empty(own, device="meta")})
        sizes = list(shape)
        depth = 0
        while prod(shape[:depth]) < len(saved):
            depth += 1
        for dim in range(depth, len(shape)):
            sizes[dim] = 3 + dim
        numbers = torch.arange(prod(sizes)).view(sizes)
        saved = skeleton.saved({whole.name: numbers.view(_fused(sizes, shape, own))})
    # Broad: conversions of several tensors into one raise errors of many types.
    except Exception:
        return (whole,)
    inner = prod(sizes[depth:])
    found = []
    for stored, value in saved.items():
        number = torch.tensor(int(value.flatten()[0]) // inner)
        index = tuple(int(x) for x in torch.unravel_index(number, shape[:depth]))
        if not torch.equal(value.flatten(), numbers[index].flatten()):
            return (whole,)
        found.append(Part(stored, shape[depth:], tuple(range(len(shape) - depth)), index))
    return tuple(sorted(found, key=lambda part: part.index))


def _fused(sizes: Sequence[int], shape: Sequence[int], own: Sequence[int]) -> list[int]:
    """Return `sizes` with those dims as one that are one dim of `own`, as those of `shape`."""
    fused = []
    at = 0
    for size in own:
        end = at + 1
        while prod(shape[at:end]) < size:
            end += 1
        fused.append(prod(sizes[at:end]))
        at = end
    return fused


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
