"""Causal attention over the heads of a tensor-parallel rank, and the choice of its kernel."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from parallel3d.base.say import Say
from parallel3d.config.arithmetic import block_tokens
from parallel3d.model.module_cost import BLOCK
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.dealt import is_fused
from parallel3d.tensor.documents import attend_documents, in_one_kernel, use_flash_3, uses_flash_3
from parallel3d.tensor.dropout import Dropout
from parallel3d.tensor.recompute import run_again
from parallel3d.tensor.segments import Segments, in_chunks, undealt_block


class CausalAttention(nn.Module):
    """Causal attention: softmax(scale * q k^T) v over the current and earlier positions.

    - `heads`: the number of query heads and of key-value heads, over all ranks.
    - `head_size`, `value_size`: features of a head of q and k, and of v; None means the same.
    - `scale`: None means 1/sqrt(head_size).
    - `window`: how many tokens a query sees, itself included; None means all before it.
    - `softcap`: c, if scores become c tanh(scores / c) before they are masked; without dropout.
    - `chunk`: a query attends within its own piece of so many tokens of the sample; without
      segments.
    - With segments, a query attends only within its own document.
    - "core_attn" in `context.recompute.parts`: recompute the attention in backward ("selective"
      recomputation, arXiv:2205.05198, section 5).
    """

    def __init__(
        self,
        dropout: float,
        place: str,
        *,
        context: LayerContext,
        heads: tuple[int, int],
        head_size: int,
        value_size: int | None = None,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        chunk: int | None = None,
    ) -> None:
        super().__init__()
        assert softcap is None or dropout == 0, "no kernel has both a soft-cap and dropout"
        self.dropout = Dropout(dropout, place, key=context.key, split_over=context.group)
        tp = context.group.size()
        self.heads_here = (heads[0] // tp, max(1, heads[1] // tp))
        self.kernel_size = max(head_size, value_size or 0)
        self.recompute = "core_attn" in context.recompute.parts
        self.scale = scale
        self.window = window
        self.softcap = softcap
        self.chunk = chunk
        self.cp = 1 if context.sample_group is None else context.sample_group.size()

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        segments: Segments | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q, k, v [batch, heads, seq, size] -> [batch, seq, heads * size of v].

        The heads of k and v divide those of q, and v may have another size. `sinks` [heads here]:
        a scalar per head joins its scores in the softmax, without a value.
        """
        return self.of_each_head(q, k, v, segments, sinks).flatten(-2)

    def of_each_head(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        segments: Segments | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return what `forward` does, with the heads in a dim: [batch, seq, heads, size of v]."""
        if self.recompute and torch.is_grad_enabled():
            y: Tensor = run_again(self._attend, q, k, v, segments, sinks)
            return y
        return self._attend(q, k, v, segments, sinks)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments | None, sinks: Tensor | None
    ) -> Tensor:
        """Return [batch, seq, heads, size of v]."""
        self.dropout.seed(q.device)
        if self.chunk is not None and self.chunk < q.shape[2]:
            assert segments is None, "chunks are of whole samples"
            segments = in_chunks(self.chunk, q.shape[0], q.shape[2], q.device)
        is_cut = self.window is not None and self.window < q.shape[2]
        is_plain = segments is None and not is_cut and sinks is None and self.softcap is None
        if not is_plain or q.shape[-1] != v.shape[-1]:
            return attend_documents(
                q,
                k,
                v,
                segments,
                self.dropout.active_p,
                self.scale,
                self.window,
                sinks,
                self.softcap,
            )
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


def kernel_of(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Tensor | None = None
) -> SDPBackend:
    """Return the kernel that torch selects for attention of q, k, v, causal or by a mask."""
    choice = torch._fused_sdp_choice(
        q, k, v, mask, dropout, mask is None, scale=None, enable_gqa=k.shape[1] != q.shape[1]
    )
    return SDPBackend(choice)


def describe_kernel(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Tensor | None = None
) -> str:
    """Return the log line about the kernel of `kernel_of`, with a warning if it is not fused."""
    kernel = kernel_of(q, k, v, dropout, mask)
    if kernel != SDPBackend.MATH:
        return f"kernel  attention runs as {_in_words(kernel)}"
    line = (
        "kernel  WARNING: this device has no fused kernel for this attention, so each layer holds "
        "several copies of all scores (batch x heads x sequence^2)"
    )
    remedies = []
    if q.dtype == torch.float32:
        remedies.append(("bf16", torch.bfloat16, dropout))
    if dropout:
        remedies.append(("an attention dropout of 0", q.dtype, 0.0))
    if len(remedies) == 2:
        remedies.append(("bf16 and an attention dropout of 0", torch.bfloat16, 0.0))
    for words, dtype, rate in remedies:
        like = partial(torch.empty_like, dtype=dtype, requires_grad=True)
        own_mask = None if mask is None else like(mask)
        if kernel_of(like(q), like(k), like(v), rate, own_mask) != SDPBackend.MATH:
            return f"{line}; try {words}"
    return line


def _in_words(kernel: SDPBackend) -> str:
    return kernel.name.lower().removesuffix("_attention").replace("_", " ")


def prefer_flash_3(stages: nn.Module, device: torch.device, *, isolated: bool) -> None:
    """Use FlashAttention-3 for documents and windows where torch has it.

    It has no dropout, and takes the place of FlashAttention-2 in the whole process.
    """
    layers = [m for m in stages.modules() if isinstance(m, CausalAttention)]
    is_used = isolated or any(layer.window is not None for layer in layers)
    if is_used and not any(layer.dropout.p for layer in layers):
        use_flash_3(device)


def log_kernel(
    stages: nn.Module,
    say: Say,
    *,
    batch: int,
    seq: int,
    dtype: torch.dtype,
    device: torch.device,
    isolated: bool,
) -> None:
    """Log which kernel computes attention, if these `stages` have any: in the layer that sees most.

    torch decides by sizes, strides and dtypes, so it is asked with tensors like a step's.
    """
    layers = [m for m in stages.modules() if isinstance(m, CausalAttention)]
    if not layers:
        return
    layer = max(layers, key=lambda m: m.window or seq)
    if layer.cp > 1 or layer.softcap is not None:
        whole = layer.cp == 1
        block = undealt_block(seq) if whole else block_tokens(seq, layer.cp)
        what = "attention with a soft-cap" if whole else "attention of dealt tokens"
        name = "flex" if is_fused(device, block) else "plain products"
        say(f"kernel  {what} runs as {name}")
        return
    q_heads, kv_heads = layer.heads_here
    like = partial(torch.empty, dtype=dtype, device=device, requires_grad=True)
    q, k, v = (
        like(batch, seq, heads, layer.kernel_size).transpose(1, 2)
        for heads in (q_heads, kv_heads, kv_heads)
    )
    has_window = layer.window is not None and layer.window < seq
    if (isolated or has_window) and in_one_kernel(q, layer.dropout.p):
        name = _in_words(SDPBackend.FLASH_ATTENTION)
        version = " 3" if uses_flash_3() else ""
        say(f"kernel  attention runs as {name}{version}")
        return
    rows = q[:, :, :BLOCK] if has_window else q
    mask = q.new_empty(rows.shape[2], seq) if has_window else None
    say(describe_kernel(rows, k, v, layer.dropout.p, mask))
