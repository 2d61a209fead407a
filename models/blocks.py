"""Layers that several families share, built from tensor-parallel layers."""

from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from parallel3d.model.config import ModelConfig
from parallel3d.models.common import scales_of
from parallel3d.tensor.attention import CausalAttention
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.dropout import Dropout
from parallel3d.tensor.linear import ColumnParallelLinear, RowParallelLinear
from parallel3d.tensor.pointwise import gelu, scale
from parallel3d.tensor.recompute import activated, recomputed
from parallel3d.tensor.segments import Segments
from parallel3d.tensor.side_loss import SideLoss
from parallel3d.tensor.vocab import VocabParallelEmbedding, VocabParallelOutput


class TokenEmbedding(nn.Module):
    """Token embedding of a family whose positions enter in the attention."""

    def __init__(self, config: ModelConfig, name: str, context: LayerContext) -> None:
        super().__init__()
        self.token = VocabParallelEmbedding(
            int(config.vocab_size), config.hidden_size, context=context
        )
        self.scale = scales_of(config).input

    def forward(self, tokens: Tensor, segments: Segments | None = None) -> Tensor:
        """tokens [batch, seq] -> [batch, seq, hidden], or this rank's part of the sequence."""
        return scale(self.token(tokens), self.scale)


class Residual:
    """A residual connection: x + scale * dropout(sublayer(norm(x))).

    The block owns norm, sublayer and dropout, whose names in it are those of its parameters, and
    passes the first two to each call. A `nn.Module` here would have hooks of ZeRO-3 without having
    parameters.

    - `kind`: the sublayer, which decides whether the norm's output is saved or recomputed.
    - `dropout`: acts on the sublayer's output; None: there is none.
    """

    def __init__(
        self,
        config: ModelConfig,
        kind: Literal["attention", "mlp", "experts"],
        *,
        context: LayerContext,
        dropout: Dropout | None = None,
    ) -> None:
        # A recomputed MLP saves its input, and a router and its experts take theirs in two places.
        saves_input = kind == "experts" or kind in context.recompute.parts
        self.recomputes_norm = "layernorm" in context.recompute.parts and not saves_input
        self.scale = scales_of(config).branch
        self.dropout = dropout

    def __call__(self, x: Tensor, norm: nn.Module, sublayer: nn.Module, *args: object) -> Any:
        """Return x plus the branch [batch, seq, hidden], or parts: a `LayerOutput`.

        `args` are further arguments of the sublayer; its side losses are returned, too.
        """
        y = recomputed(norm, x) if self.recomputes_norm else norm(x)
        y = sublayer(y, *args)
        side_losses: dict[str, SideLoss] | None = None
        if not isinstance(y, Tensor):
            y, side_losses = y
        y = scale(y, self.scale)
        if self.dropout is not None:
            y = self.dropout(y)
        # In place, because no backward needs the output of a branch.
        y = y.add_(x)
        return y if side_losses is None else (y, side_losses)


class FusedAttention(nn.Module):
    """Causal self-attention with one projection for query, key and value.

    Each tp rank computes its share of the heads.
    """

    def __init__(
        self, config: ModelConfig, name: str, *, context: LayerContext, dropout: float = 0.0
    ) -> None:
        super().__init__()
        size = config.hidden_size
        heads = config.num_attention_heads
        self.head_size = size // heads
        self.qkv = ColumnParallelLinear(size, size, context=context, fused=3)
        self.core = CausalAttention(
            dropout,
            f"{name}.attention",
            context=context,
            heads=(heads, heads),
            head_size=self.head_size,
            scale=scales_of(config).scores(self.head_size),
        )
        self.output = RowParallelLinear(size, size, context=context)

    def forward(self, x: Tensor, segments: Segments | None = None) -> Tensor:
        """x [batch, seq, hidden], or its part of the sequence -> the same shape."""
        qkv = self.qkv(x).unflatten(-1, (3, -1, self.head_size))  # [batch, seq, 3, heads/tp, size]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads/tp, seq, size]
        return self.output(self.core(q, k, v, segments))  # [batch, seq, hidden]


class GeluMLP(nn.Module):
    """Two linear layers around GELU's tanh approximation.

    Each tp rank computes its share of the inner features.
    """

    def __init__(self, config: ModelConfig, *, context: LayerContext) -> None:
        super().__init__()
        size = config.hidden_size
        inner = config.inner_size
        self.up = ColumnParallelLinear(size, inner, context=context)
        self.down = RowParallelLinear(inner, size, context=context)
        self.recompute = context.recompute
        self.gelu = partial(gelu.compiled_if(context.pointwise), approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, seq, hidden], or its part of the sequence -> the same shape."""
        return self.down(activated(self.up, self.gelu, x, self.recompute))


class NormedHead(nn.Module):
    """Final norm, logits and loss; the family's head passes its `norm`."""

    def __init__(self, config: ModelConfig, norm: nn.Module, *, context: LayerContext) -> None:
        super().__init__()
        self.norm = norm
        self.output = VocabParallelOutput(
            int(config.vocab_size), config.hidden_size, context=context
        )
        self.scale = scales_of(config).output

    def forward(self, x: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """x [batch, seq, hidden], or its part; labels [batch, seq] -> the mean loss in nats, [].

        With `weights` [batch, seq] the losses' weighted sum; in evaluation each token's loss.
        """
        return self.output(scale(self.norm(x), self.scale), labels, weights)
