"""Attention of the tokens that a context-parallel rank has to all tokens of its samples.

Keys and values are gathered over the group, and their gradients reduced and scattered
(arXiv:2407.21783, section 3.3.2). They are not kept for the backward, which gathers them again: so
what a rank keeps is its own share. Scores with a soft-cap are made here also where one rank has all
tokens, because torch's other kernels have none.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from parallel3d.mesh.transfer import all_gather_single, reduce_scatter_single
from parallel3d.tensor.collectives import Conjugate, Context
from parallel3d.tensor.compiled import graph_break
from parallel3d.tensor.cross_entropy import capped, slope_of_cap
from parallel3d.tensor.segments import Dealt

_TILE = 128  # tokens of a block of FlexAttention
_KEYS = 4096  # keys whose scores with the queries of a block are in memory at once


@graph_break("the attention of dealt tokens")
def attend_dealt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dealt: Dealt,
    scale: float | None,
    window: int | None,
    sinks: Tensor | None,
    softcap: float | None = None,
) -> Tensor:
    """Attend within documents: q, k, v [tokens here, heads, size] -> that of q with the size of v.

    Tokens are those of the flattened batch; the heads of k and v divide those of q. `window`,
    `sinks` and `softcap`: see `documents.attend_documents`.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if is_fused(q.device, dealt.block):
        gathered: Tensor = Conjugate.apply(
            _joined(k, v), partial(_gather, dealt=dealt), partial(_scatter, dealt=dealt)
        )  # [tokens, heads of k, size of k + size of v], in the order of the flattened batch
        with _gather_again(gathered, k, v, dealt):
            y, logsumexp = at_once(q, gathered, dealt, scale, window, softcap)
    else:
        y, logsumexp = _Attend.apply(q, k, v, dealt, scale, window, softcap)
    if sinks is None:
        return y
    # A sink adds its exponential to the sum, and nothing to the values.
    return y * (logsumexp - sinks).sigmoid().unsqueeze(-1).to(y.dtype)


def _joined(k: Tensor, v: Tensor) -> Tensor:
    """Return keys and values in one tensor: [tokens, heads of k, size of k + size of v]."""
    return torch.cat((k, v), -1)


def _apart(both: Tensor, key_size: int) -> tuple[Tensor, Tensor]:
    """Return keys and values, as views of both in one tensor."""
    return both[..., :key_size], both[..., key_size:]


def is_fused(device: torch.device, block: int) -> bool:
    """Return True if one kernel computes the attention of tokens dealt in blocks of this size."""
    return device.type == "cuda" and block == _TILE


def at_once(
    q: Tensor,
    gathered: Tensor,
    dealt: Dealt,
    scale: float | None,
    window: int | None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of all tokens here in one kernel, which skips blocks of masked keys.

    The second result is the logarithm of the sum of each query's exponentials, [tokens, heads].
    """
    samples = q.unflatten(0, dealt.places.shape).transpose(1, 2)  # [batch, heads, here, size]
    both = gathered.unflatten(0, (-1, dealt.seq)).transpose(1, 2)  # [batch, heads of k, seq, both]
    keys, values = _apart(both, q.shape[-1])
    y, besides = _flex(q.device)(
        samples,
        keys,
        values,
        score_mod=None if softcap is None else _cap_of_scores(softcap),
        block_mask=block_mask(dealt, window),
        scale=scale,
        enable_gqa=keys.shape[1] != q.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    return y.transpose(1, 2).flatten(0, 1), besides.lse.transpose(1, 2).flatten(0, 1)


@cache
def _flex(device: torch.device) -> Any:
    """Return FlexAttention, compiled for an accelerator."""
    return torch.compile(flex_attention, dynamic=False) if device.type == "cuda" else flex_attention


@cache
def _cap_of_scores(softcap: float) -> Callable[..., Tensor]:
    """Return the function of scores for FlexAttention: one for each cap is compiled once."""

    def cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return capped(score, softcap)

    return cap


@lru_cache(maxsize=16)
def block_mask(dealt: Dealt, window: int | None) -> BlockMask:
    """Return which blocks of keys each block of tokens here attends to, wholly or in part."""
    block = dealt.block
    earliest = dealt.first
    if window is not None:
        earliest = torch.maximum(earliest, dealt.places - (window - 1))
    first = earliest.unflatten(-1, (-1, block))  # [batch, blocks here, block]
    low = first.amin(-1).unsqueeze(-1)
    high = first.amax(-1).unsqueeze(-1)
    here = dealt.places[..., ::block].unsqueeze(-1)  # first tokens, [batch, blocks here, 1]
    begin = torch.arange(0, dealt.seq, block, device=first.device)  # first keys, [blocks]
    seen = (begin + block > low) & (begin <= here)
    whole = (begin >= high) & (begin < here)
    some_count, some_order = _listed(seen & ~whole)
    whole_count, whole_order = _listed(whole)

    def attends(batch: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (earliest[batch, query] <= key) & (key <= dealt.places[batch, query])

    lengths = dealt.places.shape[-1], dealt.seq
    return BlockMask.from_kv_blocks(
        some_count,
        some_order,
        whole_count,
        whole_order,
        block,
        mask_mod=attends,
        seq_lengths=lengths,
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of keys are True for each block here, and all with those first.

    [batch, blocks here, blocks] -> [batch, 1, blocks here] and [batch, 1, blocks here, blocks],
    the same for every head.
    """
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int().unsqueeze(1), order.int().unsqueeze(1)


@lru_cache(maxsize=32)
def _spans(dealt: Dealt, window: int | None) -> list[tuple[slice, slice]]:
    """Return neighbouring queries here, in order, and the keys that some of them attend to."""
    spans = []
    stop = 0
    for tokens, first, end in dealt.pieces:
        low = first if window is None else max(first, end - tokens + 1 - window)
        start = stop
        stop += tokens
        for begin in range(low, end, _KEYS):
            spans.append((slice(start, stop), slice(begin, min(end, begin + _KEYS))))
    return spans


def _scores(
    q: Tensor,
    k: Tensor,
    here: Tensor,
    there: Tensor,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Return scores, -inf where a key is later or left the window: [heads of k, group, n, keys].

    q [heads of k, group, n, size] and k [heads of k, keys, size] of one document, whose tokens are
    `here` [n] and `there` [keys].
    """
    scores = capped((q.flatten(1, 2) @ k.mT).view(*q.shape[:3], -1), softcap)
    hidden = there > here.unsqueeze(-1)  # [n, keys]
    if window is not None:
        hidden |= there <= here.unsqueeze(-1) - window
    return scores.masked_fill_(hidden, -torch.inf)


def _by_group(x: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """Return [heads of k, group, tokens, size] of [tokens, heads, size]."""
    return x.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).to(dtype).contiguous()


def _flat(x: Tensor, like: Tensor) -> Tensor:
    """Return [tokens, heads, ...] of [heads of k, group, tokens, ...]."""
    return x.flatten(0, 1).transpose(0, 1).to(like.dtype).contiguous()


class _Attend(torch.autograd.Function):
    """Attention, and the logarithm of the sum of each query's exponentials [tokens here, heads].

    | pass | result | collective |
    |---|---|---|
    | forward | y [tokens here, heads, size of v] | all-gather of k and v |
    | gradient of q | [tokens here, heads, size] | none |
    | gradients of k and v | [tokens here, heads of k, size] | all-gather, then reduce-scatter |

    Scores are made span by span. The softmax is made online (arXiv:1805.02867): `high` is the
    largest score so far, `total` the sum of exponentials relative to it, and `y` that of values.
    """

    @staticmethod
    def forward(
        ctx: Context,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dealt: Dealt,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Return outputs [tokens here, heads, size of v], and logsumexp."""
        gathered = _gather(_joined(k, v), dealt)  # [tokens, heads of k, both sizes]
        dtype = torch.promote_types(q.dtype, torch.float32)
        queries = _by_group(q, k.shape[1], dtype) * scale
        y = queries.new_zeros(*queries.shape[:3], v.shape[-1])
        total = queries.new_zeros(queries.shape[:3])
        high = torch.full_like(total, torch.finfo(dtype).min)
        here = dealt.flat_here
        there = torch.arange(len(gathered), device=here.device)
        # Each [heads of k, tokens, size].
        keys, values = _apart(gathered.transpose(0, 1).to(dtype), k.shape[-1])
        for at, seen in _spans(dealt, window):
            scores = _scores(
                queries[:, :, at], keys[:, seen], here[at], there[seen], window, softcap
            )  # [heads of k, group, n, keys]
            before = high[:, :, at]
            now = torch.maximum(before, scores.amax(-1))
            weights = (scores - now.unsqueeze(-1)).exp_()
            fade = (before - now).exp()
            total[:, :, at] = total[:, :, at] * fade + weights.sum(-1)
            added = (weights.flatten(1, 2) @ values[:, seen]).view_as(y[:, :, at])
            y[:, :, at] = y[:, :, at] * fade.unsqueeze(-1) + added
            high[:, :, at] = now
        y = _flat(y / total.unsqueeze(-1), q)
        logsumexp = (high + total.log()).flatten(0, 1).t().contiguous()
        kept = [gathered] if _is_recomputed() else []  # the backward follows at once
        ctx.save_for_backward(q, k, v, y, logsumexp, *kept)
        ctx.how = dealt, scale, window, softcap
        return y, logsumexp

    @staticmethod
    def backward(ctx: Context, grad: Tensor, grad_logsumexp: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v; keys and values are gathered once more."""
        q, k, v, y, logsumexp, *kept = ctx.saved_tensors
        dealt, scale, window, softcap = ctx.how
        dtype = logsumexp.dtype
        kv_heads = k.shape[1]
        here = dealt.flat_here
        queries = _by_group(q, kv_heads, dtype) * scale
        grads = _by_group(grad, kv_heads, dtype)
        to_queries = torch.zeros_like(queries)
        # A row of the scores' gradients has these in common: [heads of k, group, tokens, 1].
        common = (grad.to(dtype) * y.to(dtype)).sum(-1, keepdim=True) - grad_logsumexp.unsqueeze(-1)
        common = _by_group(common, kv_heads, dtype)
        tops = _by_group(logsumexp.unsqueeze(-1), kv_heads, dtype)
        gathered = kept[0] if kept else _gather(_joined(k, v), dealt)
        there = torch.arange(len(gathered), device=here.device)
        keys, values = _apart(gathered.transpose(0, 1).to(dtype), k.shape[-1])
        gradient = torch.zeros_like(gathered, dtype=dtype)
        to_keys, to_values = _apart(gradient.transpose(0, 1), k.shape[-1])
        for at, seen in _spans(dealt, window):
            scores = _scores(
                queries[:, :, at], keys[:, seen], here[at], there[seen], window, softcap
            )
            weights = (scores - tops[:, :, at]).exp_()
            own_grads = grads[:, :, at].flatten(1, 2)
            to_values[:, seen] += weights.flatten(1, 2).mT @ own_grads
            products = (own_grads @ values[:, seen].mT).view_as(weights)
            to_scores = weights * (products - common[:, :, at])
            if softcap is not None:  # hidden scores are -inf, and their slope is made 0
                to_scores *= slope_of_cap(scores.clamp_(min=-softcap), softcap)
            to_scores = to_scores.flatten(1, 2)
            to_queries[:, :, at] += (to_scores @ keys[:, seen]).view_as(queries[:, :, at])
            to_keys[:, seen] += to_scores.mT @ queries[:, :, at].flatten(1, 2)
        own = _scatter(gradient.to(k.dtype), dealt)  # [tokens here, heads of k, both sizes]
        grad_k, grad_v = _apart(own, k.shape[-1])
        return _flat(to_queries * scale, q), grad_k, grad_v, None, None, None, None


def _gather(own: Tensor, dealt: Dealt) -> Tensor:
    """Return all ranks' rows of `own` [tokens here, ...], in the order of the flattened batch."""
    if dealt.group is None:
        return own
    rows = own.new_empty((dealt.order.numel(), *own.shape[1:]))
    all_gather_single(rows, own, group=dealt.group)
    return rows.index_select(0, dealt.order)


def _scatter(grad: Tensor, dealt: Dealt) -> Tensor:
    """Return the sum over the ranks of the rows of `grad` [tokens, ...] that are of tokens here."""
    if dealt.group is None:
        return grad
    rows = torch.empty_like(grad, memory_format=torch.contiguous_format)
    rows.index_copy_(0, dealt.order, grad)
    own = grad.new_empty((dealt.places.numel(), *grad.shape[1:]))
    reduce_scatter_single(own, rows, group=dealt.group)
    return own


def _is_recomputed() -> bool:
    """Return True inside torch's checkpoint, whose hooks decide what is saved."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _gather_again(gathered: Tensor, k: Tensor, v: Tensor, dealt: Dealt) -> Any:
    """Return a context in which views of `gathered` are saved without their memory.

    The first backward that needs one gathers keys and values again. Where the attention is
    recomputed in backward (the hooks of torch's checkpoint are set), its memory ends with that.
    """
    if _is_recomputed():
        return nullcontext()
    storage = gathered.untyped_storage().data_ptr()
    k = k.detach()
    v = v.detach()
    again: list[Tensor] = []
    views = [0]

    def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        if tensor.untyped_storage().data_ptr() != storage:
            return tensor.detach()
        shape = tensor.shape
        stride = tensor.stride()
        offset = tensor.storage_offset()
        views[0] += 1

        def view() -> Tensor:
            if not again:
                again.append(_gather(_joined(k, v), dealt))
            views[0] -= 1
            kept = again[0] if views[0] else again.pop()
            return kept.as_strided(shape, stride, offset)

        return view

    return saved_tensors_hooks(pack, lambda kept: kept if isinstance(kept, Tensor) else kept())
