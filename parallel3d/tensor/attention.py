"""Causal attention over the heads that a tensor-parallel rank holds."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.documents import attend_documents
from parallel3d.tensor.dropout import Dropout
from parallel3d.tensor.segments import Segments


class CausalAttention(nn.Module):
    """Causal attention: softmax(scale * q k^T) v, each query seeing itself and what is before.

    With segments, a query sees its own document only. Where the context says so, all of it is
    computed again in backward ("selective" recomputation, arXiv:2205.05198, section 5). `heads` of
    queries, and of keys and values, over all ranks; `scale`: None means 1/sqrt(head_size).
    """

    def __init__(
        self,
        dropout: float,
        place: str,
        context: LayerContext,
        *,
        heads: tuple[int, int],
        head_size: int,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.dropout = Dropout(dropout, place, context.key, context.group)
        tp = context.group.size()
        self.heads_here, self.head_size = (heads[0] // tp, max(1, heads[1] // tp)), head_size
        self.recompute, self.scale = context.recompute_attention, scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments | None = None) -> Tensor:
        """q [batch, heads, seq, size]; k, v with as many heads, or a divisor of it.

        Gives [batch, seq, heads * size].
        """
        if self.recompute and torch.is_grad_enabled():
            # The mask of its dropout is a function of its place: no generator state is kept.
            y = checkpoint(
                self._attend, q, k, v, segments, use_reentrant=False, preserve_rng_state=False
            )
        else:
            y = self._attend(q, k, v, segments)
        return y.flatten(-2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments | None) -> Tensor:
        """[batch, seq, heads, size]."""
        self.dropout.seed(q.device)
        if segments is not None:
            return attend_documents(q, k, v, segments, self.dropout.active_p, self.scale)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            dropout_p=self.dropout.active_p,
            is_causal=True,
            scale=self.scale,
            enable_gqa=k.shape[1] != q.shape[1],
        )  # [batch, heads, seq, size]
        return y.transpose(1, 2)

    def extra_repr(self) -> str:
        q, kv = self.heads_here
        again = ", recomputed in backward" if self.recompute else ""
        return f"{q} query and {kv} key-value heads of {self.head_size}{again}"
