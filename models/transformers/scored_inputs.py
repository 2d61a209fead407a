"""Experts that take each token times its score (Llama 4), in the form of transformers' packed ones.

Their own forward sends every token to every expert, times a score of 0 where it was not chosen.
"""

from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.models.transformers.experts import compute


def adapt(model: nn.Module) -> None:
    """Let the layers of such experts send tokens to the chosen ones alone."""
    module: Any
    for module in model.modules():
        if type(module).__name__ == "Llama4TextMoe":
            module.__class__ = ScoredMoe
            module.experts.__class__ = ScoredExperts


class ScoredExperts(nn.Module):
    """Experts with the attributes that transformers gives to packed ones."""

    act_fn: Any
    is_concatenated = True
    is_transposed = True
    has_gate = True
    has_bias = False
    has_post_expert_norm = False
    scales_inputs = True

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        gated: Tensor = up * self.act_fn(gate)
        return gated

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [tokens, size], chosen and weights [tokens, k] -> [tokens, size]."""
        return compute(self, x, chosen, weights)


class ScoredMoe(nn.Module):
    """A router, the experts that it chooses, and one that takes every token."""

    router: Any
    experts: Any
    shared_expert: Any
    top_k: int

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [batch, seq, size] -> the same shape, and the router's scores [tokens, experts]."""
        rows = x.flatten(0, -2)  # [tokens, size]
        output = self.router(rows)
        scores = output[1] if isinstance(output, tuple) else output  # a cut router is linear alone
        values, chosen = scores.topk(self.top_k, -1)
        routed = self.experts(rows, chosen, torch.sigmoid(values.float()).to(x.dtype))
        y = self.shared_expert(rows) + routed
        return y.view_as(x), scores
