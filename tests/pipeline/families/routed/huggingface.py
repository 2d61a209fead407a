"""The same in transformers: hooks compute the side losses from whole batches."""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from parallel3d.models.routed.spec import EXPERTS, Config
from torch import Tensor, nn

from parallel3d.models.gpt import huggingface as gpt


def to_huggingface(config: Config, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return GPT-2's tensors, and a router in each block."""
    routers = {name for name in weights if ".router." in name}
    others = {name: weight for name, weight in weights.items() if name not in routers}
    named = {name.replace("blocks", "transformer.h"): weights[name] for name in routers}
    return gpt.to_huggingface(config, others) | named


def reference(config: Config) -> Any:
    """A `GPT2LMHeadModel` whose `side` has the side losses of a forward by name, of all layers."""
    model: Any = gpt.reference(config)
    model.side = {"balance": [], "z": [], "largest": [], "size": []}

    def hook(block: Any, inputs: Any, output: Any) -> None:
        y = output[0] if isinstance(output, tuple) else output
        scores = block.router(F.layer_norm(y, y.shape[-1:]))
        shares = scores.softmax(-1).mean(1)  # [batch, experts]
        model.side["balance"].append(EXPERTS * shares.square().sum(-1).mean())
        model.side["z"].append(block.router(inputs[0]).logsumexp(-1).square().mean())
        model.side["largest"].append(shares.max(-1).values.mean())

    for block in model.transformer.h:
        block.router = nn.Linear(config.hidden_size, EXPERTS, bias=False)
        block.register_forward_hook(hook)
    model.transformer.ln_f.register_forward_pre_hook(
        lambda norm, inputs: model.side["size"].append(inputs[0].square().mean())
    )
    return model
