"""The GPT-2 family on tensor-parallel layers: learned positions, pre-LayerNorm, GELU, biases.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.gpt.spec import Config
from parallel3d.tensor.collectives import copy_to_group
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.cut import cut_of, cut_parameter
from parallel3d.tensor.dropout import Dropout
from parallel3d.tensor.linear import ColumnParallelLinear, RowParallelLinear, linear
from parallel3d.tensor.norm import LayerNorm
from parallel3d.tensor.vocab import VocabParallelEmbedding, vocab_parallel_cross_entropy


class Table(nn.Module):
    """The first rows of a learned table, whole on each rank."""

    def __init__(self, rows: int, size: int, context: LayerContext) -> None:
        super().__init__()
        self.weight = cut_parameter((rows, size), None, context.group)

    def forward(self, positions: Tensor) -> Tensor:
        """positions [seq] -> [seq, size]."""
        return F.embedding(positions, self.weight)

    def extra_repr(self) -> str:
        return f"{cut_of(self.weight).global_shape}, replicated"


class Embedding(nn.Module):
    """Token plus position embedding."""

    def __init__(self, config: Config, name: str, context: LayerContext) -> None:
        super().__init__()
        size = config.hidden_size
        self.token = VocabParallelEmbedding(int(config.vocab_size), size, context.group)
        self.position = Table(config.max_position_embeddings, size, context)
        self.dropout = Dropout(config.embd_pdrop, f"{name}.dropout", context.key)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [batch, seq] -> [batch, seq, hidden]."""
        positions = torch.arange(tokens.shape[-1], device=tokens.device)
        return self.dropout(self.token(tokens) + self.position(positions))


class Attention(nn.Module):
    """Causal self-attention; each tp rank computes its share of the heads."""

    def __init__(self, config: Config, name: str, context: LayerContext) -> None:
        super().__init__()
        size, group = config.hidden_size, context.group
        self.head_size = size // config.num_attention_heads
        self.qkv = ColumnParallelLinear(size, size, group, fused=3)
        self.output = RowParallelLinear(size, size, group)
        self.dropout = Dropout(config.attn_pdrop, f"{name}.attention", context.key, group)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, seq, hidden] -> [batch, seq, hidden]."""
        qkv = self.qkv(x).unflatten(-1, (3, -1, self.head_size))  # [batch, seq, 3, heads/tp, size]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads/tp, seq, size]
        self.dropout.seed()
        y = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout.active_p, is_causal=True
        )  # [batch, heads/tp, seq, size]
        return self.output(y.transpose(1, 2).flatten(-2))  # [batch, seq, hidden]


class MLP(nn.Module):
    """Two linear layers around a GELU; each tp rank computes its share of the inner features."""

    def __init__(self, config: Config, context: LayerContext) -> None:
        super().__init__()
        inner, group = config.inner_size, context.group
        self.up = ColumnParallelLinear(config.hidden_size, inner, group)
        self.down = RowParallelLinear(inner, config.hidden_size, group)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, seq, hidden] -> [batch, seq, hidden]."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, config: Config, name: str, context: LayerContext) -> None:
        super().__init__()
        size, eps, group = config.hidden_size, config.layer_norm_epsilon, context.group
        self.norm1 = LayerNorm(size, group, eps)
        self.attention = Attention(config, name, context)
        self.dropout1 = Dropout(config.resid_pdrop, f"{name}.dropout1", context.key)
        self.norm2 = LayerNorm(size, group, eps)
        self.mlp = MLP(config, context)
        self.dropout2 = Dropout(config.resid_pdrop, f"{name}.dropout2", context.key)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, seq, hidden] -> [batch, seq, hidden]."""
        x = x + self.dropout1(self.attention(self.norm1(x)))
        return x + self.dropout2(self.mlp(self.norm2(x)))


class Output(nn.Module):
    """The projection onto the vocabulary, its rows cut over the group like the token embedding."""

    def __init__(self, config: Config, context: LayerContext) -> None:
        super().__init__()
        self.group = context.group
        shape = (int(config.vocab_size), config.hidden_size)
        self.weight = cut_parameter(shape, 0, context.group)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> this rank's logits [..., vocab / tp]."""
        return linear(copy_to_group(x, self.group), self.weight)

    def extra_repr(self) -> str:
        return f"{cut_of(self.weight).global_shape}, vocabulary / {self.group.size()}"


class Head(nn.Module):
    """Final norm, logits and loss."""

    def __init__(self, config: Config, name: str, context: LayerContext) -> None:
        super().__init__()
        self.group, self.vocab_size = context.group, int(config.vocab_size)
        self.norm = LayerNorm(config.hidden_size, context.group, config.layer_norm_epsilon)
        self.output = Output(config, context)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """x [batch, seq, hidden], labels [batch, seq] -> the mean loss in nats a token, []."""
        logits = self.output(self.norm(x))  # [batch, seq, vocab / tp]
        return vocab_parallel_cross_entropy(logits, labels, self.vocab_size, self.group).mean()
