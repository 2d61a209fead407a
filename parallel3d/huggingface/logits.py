"""Logits of one sample by our modules and by transformers, in one process on the host."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d import models
from parallel3d.huggingface.weight_files import WeightFiles
from parallel3d.model.spec import LayerSpec, tied_names
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.dropout import RandomKey

Read = Callable[[str], Tensor]  # a parameter by our name, whole, in fp32
MOST_TOKENS = 256  # of a sample: far enough for rotations to tell


@torch.no_grad()
def most_apart(folder: Path, read: Read, layout: WeightFiles) -> tuple[float, float]:
    """The largest difference of a folder's logits from ours, and the largest of ours.

    Both in fp32; ours by the weights that `read` gives, as the layout's type rounds them.
    """
    from transformers import AutoModelForCausalLM

    config = layout.config
    length = min(MOST_TOKENS, config.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (1, length), generator=generator)
    ours = _logits(read, layout, tokens)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        use_safetensors=True,
        local_files_only=True,
    )
    theirs = model.eval()(tokens, use_cache=False).logits
    return float((ours - theirs).abs().max()), float(ours.abs().max())


def _logits(read: Read, layout: WeightFiles, tokens: Tensor) -> Tensor:
    """By the modules that train, layer after layer; one of them has its weights at a time."""
    layers = models.layers(layout.config)
    originals = tied_names(layers)
    # A group of this process alone: layers ask it for its size and rank, and nothing else.
    alone: Any = dist.ProcessGroup
    context = LayerContext(alone(0, 1), RandomKey(0, 0))
    x = tokens
    for layer in layers[:-1]:
        x = _built(layer, context, read, layout, originals)(x, None)
    head: Any = _built(layers[-1], context, read, layout, originals)
    found: list[Tensor] = []
    head.output.register_forward_hook(lambda output, args, _: found.append(output.logits(args[0])))
    head(x, tokens)
    return found[0]


def _built(
    layer: LayerSpec,
    context: LayerContext,
    read: Read,
    layout: WeightFiles,
    originals: dict[str, str],
) -> nn.Module:
    """A layer with its weights."""
    place, _, name = layer.build.partition(":")
    module: nn.Module = getattr(import_module(place), name)(layer.config, layer.name, context)
    for name, parameter in module.named_parameters():
        full = f"{layer.name}.{name}"
        value = read(originals.get(full, full))
        parameter.copy_(value.to(layout.dtype))
    return module.eval()
