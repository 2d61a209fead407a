"""muP written a second time, on plain transformers: by kinds of modules, not by our roles.

As in the table of Cerebras' and EleutherAI's practitioner's guide, and where depth transfers in
table 1 of arXiv:2505.01618 with alpha = 1; relative to a base model of known sizes.
"""

from math import sqrt

import torch
import torch.nn.functional as F
from torch import nn

from parallel3d import models
from parallel3d.verify.reference import FIRST, Reference, first_weights, save_weights
from tests.verify.measuring import batches, plain_course


def plain_model(standard, mup):
    """A model of transformers in fp64, and its parameters as (matrices, tables, vectors).

    `standard` is the small config with the standard parametrisation, `mup` the other's settings.
    """
    config = standard.model
    family = models.huggingface(standard.model.family)
    model = family.reference(config).double()
    model.load_state_dict(family.to_huggingface(config, first_weights(standard)), strict=False)
    wider = config.hidden_size / mup["base_width"]
    deeper = config.num_hidden_layers / mup.get("base_depth", config.num_hidden_layers)
    head = model.get_output_embeddings()
    matrices = []
    tables = []
    vectors = []
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, nn.Embedding):
            tables += own.values()
            multiply(module, mup.get("input_multiplier", 1))
        elif module is not head and own.get("weight", NONE).dim() == 2:
            matrices.append(own["weight"])
            own["weight"].data /= sqrt(wider)
            if name.split(".")[-1] in LAST:  # these start smaller in deeper models, but not here
                own["weight"].data *= sqrt(deeper)
            vectors += [p for n, p in own.items() if n != "weight"]
        elif module is not head:
            vectors += own.values()
        kind = type(module).__name__
        if kind.endswith("Attention"):
            base = mup.get("base_head_size", HEAD)
            module.scaling = sqrt(base) / HEAD
            multiply(module, 1 / deeper)
        elif kind.endswith(("MLP", "MoeBlock")):
            multiply(module, 1 / deeper)
    if not config.tie_word_embeddings:
        tables.append(head.weight)
    factor = mup.get("output_multiplier", 1) / wider
    head.register_forward_hook(lambda _, x, logits: logits * factor)
    assert sum(map(len, (matrices, tables, vectors))) == len(list(model.parameters()))
    return model, (matrices, tables, vectors)


HEAD = 8
NONE = torch.empty(0)
LAST = ("c_proj", "o_proj", "down_proj", "w2", "dense", "dense_4h_to_h")


def multiply(module, factor):
    def hook(module, given, output):
        is_tuple = isinstance(output, tuple)
        return (output[0] * factor, *output[1:]) if is_tuple else output * factor

    module.register_forward_hook(hook)


def train_plain(standard, mup, folder):
    """The reference of `measure`: losses, norms and weights of torch's AdamW on one process."""
    model, (matrices, tables, vectors) = plain_model(standard, mup)
    adam = standard.optimizer.params
    size = standard.model
    wider = size.hidden_size / mup["base_width"]
    lr = adam.lr
    decay = adam.weight_decay
    deep = "base_depth" in mup
    deeper = size.num_hidden_layers / mup.get("base_depth", size.num_hidden_layers)
    inner, outer = (adam.eps / wider / deeper, adam.eps / wider) if deep else [adam.eps] * 2
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "lr": lr / wider, "weight_decay": decay * wider, "eps": inner},
            {"params": tables, "lr": lr, "weight_decay": decay, "eps": outer},
            {"params": vectors, "lr": lr, "weight_decay": 0.0, "eps": inner},
        ],
        betas=adam.betas,
        foreach=False,
    )
    save_weights(standard, dict(model.named_parameters()), folder / FIRST)
    losses = []
    norms = []
    for tokens, labels, _ in batches(standard):
        optimizer.zero_grad()
        logits = model(tokens, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        limit = standard.gradient_clipping or float("inf")
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
        losses.append(loss.item())
    file = folder / "plain.safetensors"
    save_weights(standard, dict(model.named_parameters()), file)
    return Reference(losses, norms, str(file), 0.0, plain_course(standard))
