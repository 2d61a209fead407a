"""The GPT-NeoX family on tensor-parallel layers: partly rotated heads, attention beside the MLP.

Black et al., arXiv:2204.06745; Biderman et al., arXiv:2304.01373.
"""

from torch import Tensor, nn

from parallel3d.models.blocks import FusedAttention, GeluMLP, NormedHead, Residual
from parallel3d.models.neox.spec import Config
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.norm import LayerNorm
from parallel3d.tensor.rotary import Rotary
from parallel3d.tensor.segments import Segments


class Block(nn.Module):
    """One transformer layer, with attention and MLP in parallel or in sequence."""

    def __init__(self, config: Config, name: str, context: LayerContext) -> None:
        super().__init__()
        size = config.hidden_size
        eps = config.layer_norm_eps
        rotary = Rotary(config.rotary_size, config.rotary_emb_base, context=context)
        approximate = "none" if config.activation == "gelu" else "tanh"
        self.norm1 = LayerNorm(size, eps, context=context)
        self.norm2 = LayerNorm(size, eps, context=context)
        self.attention = FusedAttention(config, name, context=context, rotary=rotary)
        self.residual1 = Residual(config, "attention", context=context)
        self.mlp = GeluMLP(config, context=context, approximate=approximate)
        self.residual2 = Residual(config, "mlp", context=context)
        self.parallel = config.use_parallel_residual

    def forward(self, x: Tensor, segments: Segments | None = None) -> Tensor:
        """x [batch, seq, hidden], or its part of the sequence -> the same shape."""
        attended = self.residual1(x, self.norm1, self.attention, segments)
        if not self.parallel:
            return self.residual2(attended, self.norm2, self.mlp)
        y, _ = self.residual2.branch(x, self.norm2, self.mlp)
        return y.add_(attended)


class Head(NormedHead):
    """Final LayerNorm, logits and loss."""

    def __init__(self, config: Config, name: str, context: LayerContext) -> None:
        norm = LayerNorm(config.hidden_size, config.layer_norm_eps, context=context)
        super().__init__(config, norm, context=context)
