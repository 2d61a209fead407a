"""Attention of the tokens that a context-parallel rank has to all tokens of its samples.

Keys and values are gathered over the group, and their gradients reduced and scattered
(arXiv:2407.21783, section 3.3.2). They are not kept for the backward, which gathers them again: so
what a rank keeps is its own share.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, lru_cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from parallel3d.mesh.transfer import all_gather_single, reduce_scatter_single
from parallel3d.tensor.collectives import Context
from parallel3d.tensor.compiled import graph_break
from parallel3d.tensor.segments import Dealt

_TILE = 128  # tokens of a block of FlexAttention


@graph_break("the attention of dealt tokens")
def attend_dealt(q: Tensor, k: Tensor, v: Tensor, dealt: Dealt, scale: float | None) -> Tensor:
    """Attend within documents: q, k, v [tokens here, heads, size] -> the same shape as q.

    Tokens are those of the flattened batch; the heads of k and v divide those of q.
    """
    gathered: Tensor = _Gather.apply(k, v, dealt)  # [tokens, 2, heads of k, size]
    attend = at_once if q.device.type == "cuda" and dealt.block == _TILE else _piece_by_piece
    with _gather_again(gathered, k, v, dealt):
        return attend(q, gathered, dealt, scale)


def at_once(q: Tensor, gathered: Tensor, dealt: Dealt, scale: float | None) -> Tensor:
    """Compute attention of all tokens here in one kernel, which skips blocks of masked keys."""
    samples = q.unflatten(0, dealt.places.shape).transpose(1, 2)  # [batch, heads, here, size]
    keys, values = gathered.unflatten(0, (-1, dealt.seq)).permute(2, 0, 3, 1, 4)
    y = _flex(q.device)(
        samples, keys, values, block_mask=block_mask(dealt), scale=scale,
        enable_gqa=keys.shape[1] != q.shape[1],
    )  # fmt: skip
    return y.transpose(1, 2).flatten(0, 1)


@cache
def _flex(device: torch.device) -> Any:
    """Return FlexAttention, compiled for an accelerator."""
    return torch.compile(flex_attention, dynamic=False) if device.type == "cuda" else flex_attention


@lru_cache(maxsize=16)
def block_mask(dealt: Dealt) -> BlockMask:
    """Return which blocks of keys each block of tokens here attends to, wholly or in part."""
    block = dealt.block
    first, places = (t.unflatten(-1, (-1, block)) for t in (dealt.first, dealt.places))
    begin = torch.arange(0, dealt.seq, block, device=first.device)  # of each block of keys
    low, high = (t.unsqueeze(-1) for t in (first.amin(-1), first.amax(-1)))
    here = places[..., :1]  # the first token of each block here; [batch, blocks here, 1]
    seen = (begin + block > low) & (begin <= here)
    whole = (begin >= high) & (begin < here)
    kinds: list[Tensor] = []
    for kind in (seen & ~whole, whole):
        order = kind.int().argsort(dim=-1, descending=True, stable=True)
        kinds += [t.int().unsqueeze(1) for t in (kind.sum(-1), order)]  # a head is as the others

    def attends(batch: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (dealt.first[batch, query] <= key) & (key <= dealt.places[batch, query])

    lengths = dealt.places.shape[-1], dealt.seq
    return BlockMask.from_kv_blocks(
        kinds[0], kinds[1], kinds[2], kinds[3], block, mask_mod=attends, seq_lengths=lengths
    )


def _piece_by_piece(q: Tensor, gathered: Tensor, dealt: Dealt, scale: float | None) -> Tensor:
    outputs = []
    for queries, (tokens, first, end) in zip(
        q.split([piece.tokens for piece in dealt.pieces]), dealt.pieces, strict=True
    ):
        keys, values = gathered[first:end].permute(1, 2, 0, 3).unsqueeze(1)
        y = F.scaled_dot_product_attention(
            queries.transpose(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=_mask(tokens, end - first, dealt, q.dtype, q.device),
            scale=scale,
            enable_gqa=keys.shape[1] != q.shape[1],
        )  # [1, heads, tokens of the piece, size]
        outputs.append(y.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


def _mask(tokens: int, keys: int, dealt: Dealt, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the mask of the last `tokens` of `keys` tokens: 0 or -inf, [tokens, keys]."""
    steps = _steps(dealt.block, dealt.seq, dtype, device)
    start = dealt.seq - (keys - tokens)
    return steps[:tokens, start : start + keys]


@lru_cache(maxsize=2)
def _steps(block: int, seq: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a matrix in whose row i the first `seq` + i + 1 columns are 0, the others -inf.

    Every mask is a part of it, so that layers need not keep one each.
    """
    with torch.inference_mode(False):
        full = torch.full((block, seq + block), -torch.inf, dtype=dtype, device=device)
        return full.triu(seq + 1)


class _GatherContext(Context, Protocol):
    dealt: Dealt


class _Gather(torch.autograd.Function):
    """Keys and values of the tokens here [tokens here, heads, size] -> those of all tokens.

    The result is [tokens, 2, heads, size], in the order of the flattened batch.
    """

    @staticmethod
    def forward(ctx: _GatherContext, k: Tensor, v: Tensor, dealt: Dealt) -> Tensor:
        ctx.dealt = dealt
        return _gather(k, v, dealt)

    @staticmethod
    def backward(ctx: _GatherContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        dealt = ctx.dealt
        rows = torch.empty_like(grad, memory_format=torch.contiguous_format)
        rows.index_copy_(0, dealt.order, grad)
        own = grad.new_empty((dealt.places.numel(), *grad.shape[1:]))
        reduce_scatter_single(own, rows, group=dealt.group)
        return own[:, 0], own[:, 1], None


def _gather(k: Tensor, v: Tensor, dealt: Dealt) -> Tensor:
    own = torch.stack((k, v), 1)  # [tokens here, 2, heads, size]
    rows = own.new_empty((dealt.order.numel(), *own.shape[1:]))
    all_gather_single(rows, own, group=dealt.group)
    return rows.index_select(0, dealt.order)


def _gather_again(gathered: Tensor, k: Tensor, v: Tensor, dealt: Dealt) -> Any:
    """Return a context in which views of `gathered` are saved without their memory.

    The first backward that needs one gathers keys and values again. Where the attention is
    recomputed in backward (the hooks of torch's checkpoint are set), its memory ends with that.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return nullcontext()
    storage, k, v = gathered.untyped_storage().data_ptr(), k.detach(), v.detach()
    again: list[Tensor] = []
    views = [0]

    def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        if tensor.untyped_storage().data_ptr() != storage:
            return tensor.detach()
        shape, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        views[0] += 1

        def view() -> Tensor:
            if not again:
                again.append(_gather(k, v, dealt))
            views[0] -= 1
            kept = again[0] if views[0] else again.pop()
            return kept.as_strided(shape, stride, offset)

        return view

    return saved_tensors_hooks(pack, lambda kept: kept if isinstance(kept, Tensor) else kept())
