"""GPT-2 and its training step in plain PyTorch, on one process, sharing nothing with our layers.

Weights come as a dict of whole tensors under our global names; everything else is written from the
paper: no module, no mesh, no microbatches (the batch is one), no engine.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from parallel3d.config import RunConfig


def forward(weights, config, tokens, labels):
    """The mean cross-entropy of a batch of tokens [batch, seq]."""
    heads, eps = config.num_attention_heads, config.layer_norm_epsilon
    x = weights["embedding.token.weight"][tokens]
    x = x + weights["embedding.position.weight"][: tokens.shape[1]]
    for i in range(config.num_hidden_layers):
        w = {k.removeprefix(f"blocks.{i}."): v for k, v in weights.items()}
        x = x + attention(layer_norm(x, w, "norm1", eps), w, heads)
        h = layer_norm(x, w, "norm2", eps) @ w["mlp.up.weight"].T + w["mlp.up.bias"]
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + h @ w["mlp.down.weight"].T + w["mlp.down.bias"]
    x = layer_norm(x, weights, "head.norm", eps)
    table = weights.get("head.output.weight", weights["embedding.token.weight"])
    logits = x @ table.T
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def layer_norm(x, w, name, eps):
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + eps) * w[f"{name}.weight"] + w[f"{name}.bias"]


def attention(x, w, heads):
    batch, seq, hidden = x.shape
    q, k, v = (
        (x @ w["attention.qkv.weight"][i].T + w["attention.qkv.bias"][i])
        .view(batch, seq, heads, -1)
        .transpose(1, 2)
        for i in range(3)
    )
    scores = q @ k.transpose(-1, -2) / math.sqrt(hidden // heads)
    future = torch.triu(torch.ones(seq, seq, dtype=torch.bool), 1)
    y = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
    y = y.transpose(1, 2).reshape(batch, seq, hidden)
    return y @ w["attention.output.weight"].T + w["attention.output.bias"]


def train(weights, config, batches, optimizer):
    """AdamW over `batches` of (tokens, labels); gives losses, gradient norms and final weights.

    In fp64: what differs from it is the mesh's own rounding, not this one's too.

    `optimizer` has lr, betas, eps, weight_decay and clip. Weight decay is for matrices and
    embeddings, not for biases and norms.
    """
    weights = {k: v.double().requires_grad_() for k, v in weights.items()}
    matrices = [v for k, v in weights.items() if k.endswith(".weight") and "norm" not in k]
    others = [v for k, v in weights.items() if not (k.endswith(".weight") and "norm" not in k)]
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": optimizer["weight_decay"]},
         {"params": others, "weight_decay": 0.0}],
        lr=optimizer["lr"], betas=optimizer["betas"], eps=optimizer["eps"], foreach=False,
    )  # fmt: skip
    losses, norms = [], []
    for tokens, labels in batches:
        adam.zero_grad()
        loss = forward(weights, config, tokens, labels)
        loss.backward()
        norms.append(
            float(torch.nn.utils.clip_grad_norm_(list(weights.values()), optimizer["clip"]))
        )
        adam.step()
        losses.append(loss.item())
    return losses, norms, {k: v.detach().float() for k, v in weights.items()}


def held_out_loss(directory, corpus, samples, length):
    """The mean loss of the first held-out windows, by plain PyTorch on the files of the run."""
    weights = {}
    for path in (directory / "weights").glob("*.safetensors"):
        weights |= load_file(path)
    config = RunConfig.from_json(str(directory / "config.json"))
    text = np.asarray(corpus.held_out.tokens, dtype=np.int64)
    windows = np.stack([text[i * length : i * length + length + 1] for i in range(samples)])
    tokens = torch.from_numpy(windows)
    with torch.no_grad():
        return float(forward(weights, config.model, tokens[:, :-1], tokens[:, 1:]))
