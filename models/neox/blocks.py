"""The GPT-NeoX family on tensor-parallel layers: partly rotated heads, attention beside the MLP.

Black et al., arXiv:2204.06745; Biderman et al., arXiv:2304.01373.
"""

from torch import Tensor, nn

from parallel3d.models.blocks import FusedAttention, GeluMLP, NormedHead
from parallel3d.models.common import scales_of
from parallel3d.models.neox.spec import Config
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.norm import LayerNorm
from parallel3d.tensor.pointwise import scale
from parallel3d.tensor.recompute import normed
from parallel3d.tensor.rotary import Rotary
from parallel3d.tensor.segments import Segments


class Block(nn.Module):
    """One transformer layer, with attention and MLP in parallel or in sequence."""

    def __init__(self, config: Config, name: str, context: LayerContext) -> None:
        super().__init__()
        size = config.hidden_size
        eps = config.layer_norm_eps
        self.norm1 = LayerNorm(size, eps, context=context)
        self.norm2 = LayerNorm(size, eps, context=context)
        rotary = Rotary(config.rotary_size, config.rotary_emb_base, context=context)
        self.attention = FusedAttention(config, name, context=context, rotary=rotary)
        approximate = "none" if config.activation == "gelu" else "tanh"
        self.mlp = GeluMLP(config, context=context, approximate=approximate)
        self.recompute = context.recompute
        self.parallel = config.use_parallel_residual
        self.scale = scales_of(config).branch

    def forward(self, x: Tensor, segments: Segments | None = None) -> Tensor:
        """x [batch, seq, hidden], or its part of the sequence -> the same shape."""
        # In place, because no backward needs the output of a branch.
        y = normed(self.norm1, x, self.recompute)
        summed = scale(self.attention(y, segments), self.scale).add_(x)
        if not self.parallel:
            x = summed
        y = normed(self.norm2, x, self.recompute, "mlp")
        return scale(self.mlp(y), self.scale).add_(summed)


class Head(NormedHead):
    """Final LayerNorm, logits and loss."""

    def __init__(self, config: Config, name: str, context: LayerContext) -> None:
        norm = LayerNorm(config.hidden_size, config.layer_norm_eps, context=context)
        super().__init__(config, norm, context=context)
