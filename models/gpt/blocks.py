"""The GPT-2 family on tensor-parallel layers: learned positions, pre-LayerNorm, GELU, biases.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.models.blocks import FusedAttention, GeluMLP, NormedHead, Residual
from parallel3d.models.common import scales_of
from parallel3d.models.gpt.spec import Config
from parallel3d.tensor.collectives import sequence_part
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.cut import CutModule, cut_parameter
from parallel3d.tensor.dropout import Dropout
from parallel3d.tensor.norm import LayerNorm
from parallel3d.tensor.pointwise import scale
from parallel3d.tensor.segments import Segments
from parallel3d.tensor.vocab import VocabParallelEmbedding


class Table(CutModule):
    """The first rows of a learned table, replicated on each rank."""

    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.weight = cut_parameter((rows, size))

    def forward(self, positions: Tensor) -> Tensor:
        """positions [...] -> [..., size]."""
        return F.embedding(positions, self.weight)


class Embedding(nn.Module):
    """Token plus position embedding."""

    def __init__(self, config: Config, name: str, context: LayerContext) -> None:
        super().__init__()
        size = config.hidden_size
        split = context.sequence_group
        self.token = VocabParallelEmbedding(int(config.vocab_size), size, context=context)
        self.position = Table(config.max_position_embeddings, size)
        self.dropout = Dropout(
            config.embd_pdrop, f"{name}.dropout", key=context.key, split_over=split
        )
        self.split = split
        self.scale = scales_of(config).input

    def forward(self, tokens: Tensor, segments: Segments | None = None) -> Tensor:
        """tokens [batch, seq] -> [batch, seq, hidden], or this rank's part of the sequence."""
        positions = torch.arange(tokens.shape[-1], device=tokens.device)
        if segments is not None:
            positions = segments.positions  # [batch, seq]
        if self.split is not None:
            positions = sequence_part(positions, self.split, -1)
        return self.dropout(scale(self.token(tokens) + self.position(positions), self.scale))


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, config: Config, name: str, context: LayerContext) -> None:
        super().__init__()
        size = config.hidden_size
        eps = config.layer_norm_epsilon
        dropout = partial(
            Dropout, config.resid_pdrop, key=context.key, split_over=context.sequence_group
        )
        self.norm1 = LayerNorm(size, eps, context=context)
        self.attention = FusedAttention(config, name, context=context, dropout=config.attn_pdrop)
        self.dropout1 = dropout(f"{name}.dropout1")
        self.residual1 = Residual(config, "attention", context=context, dropout=self.dropout1)
        self.norm2 = LayerNorm(size, eps, context=context)
        self.mlp = GeluMLP(config, context=context)
        self.dropout2 = dropout(f"{name}.dropout2")
        self.residual2 = Residual(config, "mlp", context=context, dropout=self.dropout2)

    def forward(self, x: Tensor, segments: Segments | None = None) -> Tensor:
        """x [batch, seq, hidden], or its part of the sequence -> the same shape."""
        x = self.residual1(x, self.norm1, self.attention, segments)
        return self.residual2(x, self.norm2, self.mlp)


class Head(NormedHead):
    """Final LayerNorm, logits and loss."""

    def __init__(self, config: Config, name: str, context: LayerContext) -> None:
        norm = LayerNorm(config.hidden_size, config.layer_norm_epsilon, context=context)
        super().__init__(config, norm, context=context)
