"""Causal attention within documents and windows, without a mask of sequence x sequence.

The work grows with the squares of the documents' lengths, not of the sequence length, and with a
window in proportion to the lengths.
"""

from contextlib import suppress
from functools import cache, partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.model.module_cost import BLOCK, SINK_SIZE
from parallel3d.tensor.compiled import graph_break
from parallel3d.tensor.dealt import attend_dealt
from parallel3d.tensor.segments import Segments, undealt

_HALF = (torch.bfloat16, torch.float16)


def attend_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments | None,
    dropout: float,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend within documents: q, k, v [batch, heads, seq, size] -> [batch, seq, heads, size of v].

    - The heads of k and v divide those of q. Those of v may have another size.
    - `segments`: None means that each sample is one document. Where samples are dealt to cp ranks,
      k and v are those of the tokens here.
    - `scale`: None means 1/sqrt(size).
    - `window`: how many tokens a query sees, itself included; None means all.
    - `sinks` [heads]: a further score of each head in the softmax, without a value.
    - `softcap`: c, if scores become c tanh(scores / c) before they are masked (arXiv:2408.00118,
      section 2); without dropout.

    torch's variable-length kernel computes all documents at once if it can (`in_one_kernel`);
    otherwise each is computed separately.
    """
    dealt = None if segments is None else segments.dealt
    if softcap is not None and dealt is None:
        dealt = undealt(segments, q.shape[0], q.shape[2], q.device)
    if dealt is not None:
        assert dropout == 0, "the masks of a shared sample would depend on how it is dealt"
        y = attend_dealt(_flat(q), _flat(k), _flat(v), dealt, scale, window, sinks, softcap)
        return y.unflatten(0, (q.shape[0], -1))
    attend = _attend_whole if segments is None else _attend_apart
    if q.shape[-1] == v.shape[-1]:
        return attend(q, k, v, segments, dropout, scale, window, sinks)
    # Fused kernels take heads of one size: the smaller are filled with zeros.
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    value_size = v.shape[-1]
    size = max(q.shape[-1], value_size)
    q, k, v = (_widened(t, size) for t in (q, k, v))
    return attend(q, k, v, segments, dropout, scale, window, sinks)[..., :value_size]


def _flat(x: Tensor) -> Tensor:
    """Return [batch * seq, heads, size] of [batch, heads, seq, size].

    It is a view, because that is the memory layout of the products before.
    """
    return x.transpose(1, 2).flatten(0, 1)


def _widened(x: Tensor, size: int) -> Tensor:
    """Return heads of `size` features, with zeros at the end, in the memory layout of `_flat`."""
    if x.shape[-1] == size:
        return x
    return F.pad(x.transpose(1, 2), (0, size - x.shape[-1])).transpose(1, 2)


def _attend_whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments | None,
    dropout: float,
    scale: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend within documents of whole samples, whose heads have one size."""
    batch, _, seq, _ = q.shape
    flat_q, flat_k, flat_v = map(_flat, (q, k, v))
    attend = partial(_attend, dropout=dropout, scale=scale, window=window, sinks=sinks)
    if in_one_kernel(q, dropout, sinks is not None):
        y = _at_once(flat_q, flat_k, flat_v, segments, seq, scale, window)
        return y.unflatten(0, (batch, seq))
    if segments is None:
        return attend(q, k, v).transpose(1, 2)
    by_document = [t.split(segments.lengths) for t in (flat_q, flat_k, flat_v)]
    outputs = []
    for parts in zip(*by_document, strict=True):
        one_sample = [part.transpose(0, 1).unsqueeze(0) for part in parts]
        y = attend(*one_sample)  # [1, heads, tokens, size]
        outputs.append(y.squeeze(0).transpose(0, 1))  # [tokens, heads, size]
    return torch.cat(outputs).unflatten(0, (batch, seq))


# A graph would be compiled anew for each microbatch's lengths.
_attend_apart = graph_break("documents, whose lengths are known at run time")(_attend_whole)


def in_one_kernel(q: Tensor, dropout: float, sinks: bool = False) -> bool:
    """Return True if torch's variable-length flash attention (Ampere or newer) supports q."""
    fits = q.shape[-1] <= 256 and q.shape[-1] % 8 == 0 and q.dtype in _HALF and dropout == 0
    return q.device.type == "cuda" and fits and not sinks and _has_kernel(q.device)


@cache
def _has_kernel(device: torch.device) -> bool:
    return (
        torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and _kernel() is not None
    )


def use_flash_3(device: torch.device) -> None:
    """Let torch's flash attention be FlashAttention-3 in this process, if it is installed.

    It needs Hopper and the package flash_attn_interface, and has neither dropout nor, for every
    size, a deterministic backward.
    """
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    if is_hopper and not torch.are_deterministic_algorithms_enabled():
        with suppress(Exception):  # no such package, or one that this torch does not take
            torch.nn.attention.activate_flash_attention_impl("FA3")


def uses_flash_3() -> bool:
    """Return True if flash attention is FlashAttention-3 in this process."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return current is not None and current() == "FA3"


@cache
def _kernel() -> Any:
    """Return torch's function, or None before torch 2.12 (no grouped queries)."""
    from torch.nn.attention.varlen import varlen_attn  # it takes seconds

    parameters = signature(varlen_attn).parameters
    return varlen_attn if {"enable_gqa", "window_size"} <= parameters.keys() else None


def _at_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments | None,
    seq: int,
    scale: float | None,
    window: int | None,
) -> Tensor:
    if segments is None:
        bounds = torch.arange(0, len(q) + 1, seq, dtype=torch.int32, device=q.device)
        longest = seq
    else:
        bounds = segments.bounds
        longest = max(segments.lengths)
    # Earlier and later positions that a token sees besides itself; -1: all.
    around = (-1 if window is None else window - 1, 0)
    grouped = k.shape[1] != q.shape[1]
    return _kernel()(
        q,
        k,
        v,
        bounds,
        bounds,
        longest,
        longest,
        scale=scale,
        window_size=around,
        enable_gqa=grouped,
    )


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout: float,
    scale: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend within samples of one document each: [batch, heads, seq, size] -> the same shape."""
    size = q.shape[-1]
    seq = q.shape[2]
    first = 0 if sinks is None else 1  # the sink stands before the tokens
    if sinks is not None:
        scale = size**-0.5 if scale is None else scale
        q, k, v = _with_sink(q, k, v, sinks / scale)
    attend = partial(
        F.scaled_dot_product_attention,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=k.shape[1] != q.shape[1],
    )
    if window is None or window >= seq:
        return attend(q, k, v, is_causal=True)[:, :, first:, :size]
    mask = _band(min(BLOCK, seq), window, q)  # [queries, window - 1 + queries]
    outputs = []
    for number, queries in enumerate(q[:, :, first:].split(BLOCK, 2)):
        start = BLOCK * number
        stop = start + queries.shape[2]
        earliest = max(0, start + 1 - window)
        seen = mask[: stop - start, earliest - start + window - 1 :][:, : stop - earliest]
        keys = k[:, :, first + earliest : first + stop]
        values = v[:, :, first + earliest : first + stop]
        if sinks is not None:
            keys = torch.cat([k[:, :, :1], keys], 2)
            values = torch.cat([v[:, :, :1], values], 2)
            seen = F.pad(seen, (1, 0))
        outputs.append(attend(queries, keys, values, attn_mask=seen))
    return torch.cat(outputs, 2)[..., :size]


def _band(queries: int, window: int, like: Tensor) -> Tensor:
    """Return what is added to scores of consecutive queries: 0, or -inf outside the window.

    The last column is the last query's own: [queries, window - 1 + queries].
    """
    outside = like.new_full((queries, window - 1 + queries), float("-inf"))
    return outside.triu(window) + outside.tril(-1)


def _with_sink(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, ...]:
    """Prepend a token whose product with the queries of each head is `sinks`, and whose value is 0.

    [batch, heads, seq, size] -> [batch, heads, 1 + seq, size + 8].
    """
    size = q.shape[-1]
    q, k, v = (F.pad(t, (0, SINK_SIZE, 1, 0)) for t in (q, k, v))
    q[..., size] = sinks.view(1, -1, 1)
    k[:, :, 0, size] = 1
    return q, k, v
