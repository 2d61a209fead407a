"""Llama's blocks with experts: a router, the experts that it chooses, and the loads' balance."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from parallel3d.models.llama import blocks as llama
from parallel3d.models.moe.spec import Config
from parallel3d.tensor.collectives import copy_to_group, reduce_from_group
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.cut import cut_parameter
from parallel3d.tensor.experts import Experts, PartialSwiGLU
from parallel3d.tensor.pointwise import scale
from parallel3d.tensor.product import linear
from parallel3d.tensor.router_losses import RouterLosses, loads_of
from parallel3d.tensor.side_loss import SideLoss

_TINY = 1e-20  # DeepSeek-V3's, added to the sum of a token's weights


class Routing(NamedTuple):
    """The decisions of a router about all tokens of a microbatch.

    - `logits` [tokens, experts], `shares` [tokens, experts]: shares have the sum 1.
    - `chosen`, `weights` [tokens, k]: each token's experts, and their weights.
    - `counts` [experts]: the number of each expert's tokens.
    """

    logits: Tensor
    shares: Tensor
    chosen: Tensor
    weights: Tensor
    counts: Tensor


class Router(nn.Module):
    """The choice of each token's experts, in fp32.

    With `score_bias`, `counts` are the tokens of each expert since the engine has set them to 0; it
    moves the bias by them (engine/score_biases.py).
    """

    counts: Tensor  # int64, [experts]

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.bias_rate = config.score_bias_rate
        self.weight = cut_parameter((config.num_experts, config.hidden_size))
        self.score_bias = cut_parameter((config.num_experts,)) if config.score_bias else None
        counts = torch.zeros(config.num_experts, dtype=torch.int64)
        self.register_buffer("counts", counts, persistent=False)

    def forward(self, x: Tensor) -> Routing:
        """Route x [tokens, hidden]."""
        c = self.config
        logits = linear(x, self.weight, torch.float32)  # [tokens, experts]
        scores = shares = logits.sigmoid() if c.router == "sigmoid" else logits.softmax(-1)
        if c.router == "sigmoid":
            shares = scores / scores.sum(-1, keepdim=True)
        if c.router == "topk_softmax":
            scores = logits
        chosen = self._choose(scores.detach())  # [tokens, k]
        weights = scores.gather(-1, chosen)
        if c.router == "topk_softmax":
            weights = weights.softmax(-1)
        elif c.norm_topk_prob:
            tiny = _TINY if c.router == "sigmoid" else 0.0
            weights = weights / (weights.sum(-1, keepdim=True) + tiny)
        weights = scale(weights, c.routed_scaling_factor)
        counts = x.new_zeros(c.num_experts, dtype=torch.float32)
        counts.scatter_add_(0, chosen.flatten(), torch.ones_like(weights).flatten())
        if self.score_bias is not None and self.training:
            # A recomputed forward counts again, but so do those of all microbatches.
            self.counts += counts.to(torch.int64)
        return Routing(logits, shares, chosen, weights, counts)

    def _choose(self, scores: Tensor) -> Tensor:
        """Return the experts [tokens, k] with the largest scores [tokens, experts] and biases."""
        c = self.config
        if self.score_bias is not None:
            scores = scores + self.score_bias.detach().float()
        if c.n_group > 1:
            groups = scores.unflatten(-1, (c.n_group, -1))  # [tokens, groups, experts of each]
            best = groups.topk(2, -1).values.sum(-1).topk(c.topk_group, -1).indices
            left_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(-1, best, False)
            scores = groups.masked_fill(left_out.unsqueeze(-1), float("-inf")).flatten(-2)
        return scores.topk(c.num_experts_per_tok, -1).indices


class MoE(nn.Module):
    """Routed experts and a shared one; each tp rank computes its share of the inner features."""

    def __init__(self, config: Config, name: str, *, context: LayerContext) -> None:
        super().__init__()
        size = config.hidden_size
        inner = config.expert_size
        shared = config.n_shared_experts
        self.config = config
        self.loads = f"{name}.loads"
        self.context = context
        self.router = Router(config)
        self.experts = Experts(
            config.num_experts, size, inner, context=context, capacity=config.capacity_factor
        )
        self.shared: PartialSwiGLU | None = None
        if shared:
            self.shared = PartialSwiGLU(size, shared * inner, context=context)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, SideLoss]]:
        """x [batch, seq, hidden], or its part of the sequence -> the same shape, side losses."""
        x = copy_to_group(x, self.context)  # [batch, seq, hidden]
        routing = self.router(x.flatten(0, -2))
        shared: list[Tensor] = []

        def meanwhile() -> None:
            """Compute the shared experts while tokens are on their way to other ranks."""
            if self.shared is not None:
                shared.append(self.shared(x))

        tokens = x.flatten(0, -2)
        y = self.experts(tokens, routing.chosen, routing.weights, routing.counts, meanwhile)
        y = sum(shared, y.view_as(x))
        side_losses = self._side_losses(routing, len(x))
        return reduce_from_group(y, self.context), side_losses

    def _side_losses(self, routing: Routing, batch: int) -> dict[str, SideLoss]:
        c = self.config
        losses = RouterLosses(
            c.side_losses,
            c.router_aux_loss,
            self.context.sample_group,
            alike=self.context.group.size(),
        )
        side_losses = losses.of(routing.logits, routing.shares, routing.chosen, batch)
        counts = routing.counts
        rows = routing.chosen.numel()
        dropped = (counts - self.experts.limit(rows)).clamp(min=0).sum() / rows
        return side_losses | {self.loads: loads_of(counts, rows, dropped)}


class Block(llama.Block):
    """One transformer layer, with experts or an ordinary MLP; experts return side losses, too."""

    def __init__(self, config: Config, name: str, context: LayerContext) -> None:
        number = int(name.rpartition(".")[2])
        experts = MoE(config, name, context=context) if config.is_sparse(number) else None
        super().__init__(config, name, context, experts)


Head = llama.Head
