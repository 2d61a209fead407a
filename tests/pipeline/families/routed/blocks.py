"""Blocks whose side losses need the input, the output and a weight of their own."""

import torch.nn.functional as F
from parallel3d.models.routed.spec import COEFFICIENTS, EXPERTS, Config
from torch import Tensor, nn

from parallel3d.models.gpt import blocks as gpt
from parallel3d.tensor.collectives import sum_parts
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.cut import cut_parameter
from parallel3d.tensor.segments import Segments
from parallel3d.tensor.side_loss import LayerOutput, SideLoss


class Router(nn.Module):
    """Scores of experts."""

    def __init__(self, config: Config, context: LayerContext) -> None:
        super().__init__()
        self.weight = cut_parameter((EXPERTS, config.hidden_size))
        self.context = context

    def forward(self, x: Tensor, y: Tensor) -> dict[str, SideLoss]:
        """A block's input and output [batch, seq, hidden], or parts -> its side losses."""
        # A norm, unlike a product, keeps the output itself for its backward.
        scores = F.linear(F.layer_norm(y, y.shape[-1:]), self.weight)
        shares = over_sequence(scores.softmax(-1), self.context)  # [batch, experts]
        size = F.linear(x, self.weight).logsumexp(-1, keepdim=True).square()
        values = {
            "balance": EXPERTS * shares.square().sum(-1).mean(),
            "z": over_sequence(size, self.context).mean(),
            "largest": shares.amax(-1).mean(),
        }
        return {name: SideLoss(value, COEFFICIENTS[name]) for name, value in values.items()}


def over_sequence(x: Tensor, context: LayerContext) -> Tensor:
    """Mean over each sample's tokens: [batch, seq or its part, size] -> [batch, size]."""
    total = x.sum(1)
    if not context.sequence_parallel:
        return total / x.shape[1]
    return sum_parts(total, context) / (x.shape[1] * context.group.size())


class Block(gpt.Block):
    """One transformer layer with a router."""

    def __init__(self, config: Config, name: str, context: LayerContext) -> None:
        super().__init__(config, name, context)
        self.router = Router(config, context)

    def forward(self, x: Tensor, segments: Segments | None = None) -> LayerOutput:
        """x [batch, seq, hidden], or its part of the sequence -> the same shape, side losses."""
        y = super().forward(x, segments)
        return y, self.router(x, y)


class Embedding(gpt.Embedding):
    """Token plus position embedding."""


class Head(gpt.Head):
    """Final LayerNorm, logits and loss, and how large the activations are."""

    def __init__(self, config: Config, name: str, context: LayerContext) -> None:
        super().__init__(config, name, context)
        self.context = context

    def forward(self, x: Tensor, labels: Tensor, weights: Tensor | None = None) -> LayerOutput:
        """x [batch, seq, hidden], or its part; labels [batch, seq] -> the loss, a side loss."""
        size = over_sequence(x.square(), self.context).mean()
        loss = super().forward(x, labels, weights)
        return loss, {"size": SideLoss(size, COEFFICIENTS["size"])}
