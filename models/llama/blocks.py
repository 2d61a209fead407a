"""The Llama family on tensor-parallel layers: RMSNorm, rotary positions, SwiGLU, grouped queries.

Touvron et al., arXiv:2302.13971 and 2307.09288; grouped-query attention is arXiv:2305.13245.
"""

from functools import partial
from typing import Literal

from torch import Tensor, nn

from parallel3d.models.blocks import NormedHead, Residual
from parallel3d.models.common import scales_of
from parallel3d.models.llama.spec import Config
from parallel3d.tensor.attention import CausalAttention
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.linear import ColumnParallelLinear, GroupedColumnLinear, RowParallelLinear
from parallel3d.tensor.norm import RMSNorm, WidthNorm
from parallel3d.tensor.pointwise import swiglu
from parallel3d.tensor.recompute import activated
from parallel3d.tensor.rotary import Rotary, llama3_scaling, yarn_scaling
from parallel3d.tensor.segments import Segments
from parallel3d.tensor.side_loss import LayerOutput


class Attention(nn.Module):
    """Causal self-attention with grouped queries; each tp rank computes its share of the heads."""

    def __init__(self, config: Config, name: str, *, context: LayerContext) -> None:
        super().__init__()
        size = config.head_size
        hidden = config.hidden_size
        heads = {"q": config.num_attention_heads, "k": config.kv_heads, "v": config.kv_heads}
        self.qkv = GroupedColumnLinear(
            hidden, heads, size, context=context, bias=config.attention_bias
        )
        self.q_norm = _head_norm(config, heads["q"], context)
        self.k_norm = _head_norm(config, heads["k"], context)
        number = int(name.rpartition(".")[2])
        self.rotary = _rotary(config, context)
        self.core = CausalAttention(
            config.attn_pdrop,
            f"{name}.attention",
            context=context,
            heads=(heads["q"], heads["k"]),
            head_size=size,
            scale=scales_of(config).scores(size),
            window=config.window(number),
        )
        self.output = RowParallelLinear(
            heads["q"] * size, hidden, context=context, bias=config.attention_output_bias
        )

    def forward(self, x: Tensor, segments: Segments | None = None) -> Tensor:
        """x [batch, seq, hidden], or its part of the sequence -> the same shape."""
        q, k, v = self.qkv(x)  # each [batch, seq, heads here, size]
        q = self.q_norm(q)
        k = self.k_norm(k)
        q = q.transpose(1, 2)  # [batch, heads here, seq, size]
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        q, k = self.rotary(q, k, segments)
        return self.output(self.core(q, k, v, segments))  # [batch, seq, hidden]


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202); each tp rank computes its share of the inner features."""

    def __init__(self, config: Config, *, context: LayerContext) -> None:
        super().__init__()
        size = config.hidden_size
        inner = config.inner_size
        bias = config.mlp_bias
        self.gate_up = ColumnParallelLinear(size, inner, context=context, bias=bias, fused=2)
        self.down = RowParallelLinear(inner, size, context=context, bias=bias)
        self.recompute = context.recompute
        self.swiglu = swiglu.compiled_if(context.pointwise)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, seq, hidden], or its part of the sequence -> the same shape."""
        return self.down(activated(self.gate_up, self.swiglu, x, self.recompute))


class Block(nn.Module):
    """One transformer layer; a family may pass its own `mlp`, a mixture of experts."""

    def __init__(
        self, config: Config, name: str, context: LayerContext, mlp: nn.Module | None = None
    ) -> None:
        super().__init__()
        size = config.hidden_size
        eps = config.rms_norm_eps
        self.norm1 = RMSNorm(size, eps, context=context)
        self.attention = Attention(config, name, context=context)
        self.residual1 = Residual(config, "attention", context=context)
        self.norm2 = RMSNorm(size, eps, context=context)
        self.mlp = mlp or MLP(config, context=context)
        kind: Literal["mlp", "experts"] = "mlp" if mlp is None else "experts"
        self.residual2 = Residual(config, kind, context=context)

    def forward(self, x: Tensor, segments: Segments | None = None) -> LayerOutput:
        """x [batch, seq, hidden], or its part of the sequence -> the same shape."""
        x = self.residual1(x, self.norm1, self.attention, segments)
        return self.residual2(x, self.norm2, self.mlp)


class Head(NormedHead):
    """Final RMSNorm, logits and loss."""

    def __init__(self, config: Config, name: str, context: LayerContext) -> None:
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context=context)
        super().__init__(config, norm, context=context)


def _head_norm(config: Config, heads: int, context: LayerContext) -> nn.Module:
    size = config.head_size
    eps = config.rms_norm_eps
    if config.qk_norm and config.norms_width:
        return WidthNorm(heads, size, eps, context=context)
    return RMSNorm(size, eps, context=context) if config.qk_norm else nn.Identity()


def _rotary(config: Config, context: LayerContext) -> Rotary:
    scaling = config.rope_scaling
    rotary = partial(Rotary, config.rotary_size, config.rope_theta, context=context)
    # "dynamic" changes sequences beyond max_position_embeddings only, which are not trained on.
    if scaling is None or scaling.rope_type == "dynamic":
        return rotary()
    factor = scaling.factor
    length = scaling.original_max_position_embeddings
    if scaling.rope_type == "linear":  # position interpolation (arXiv:2306.15595)
        return rotary(scaling=lambda frequencies: frequencies / factor)
    if scaling.rope_type == "llama3":
        low = scaling.low_freq_factor
        high = scaling.high_freq_factor
        llama3 = partial(llama3_scaling, factor=factor, low=low, high=high, length=length)
        return rotary(scaling=llama3)
    theta = config.rope_theta
    slow = scaling.beta_slow
    fast = scaling.beta_fast
    yarn = partial(yarn_scaling, theta=theta, factor=factor, slow=slow, fast=fast, length=length)
    return rotary(scaling=yarn, factor=scaling.rotation_factor)
