"""Causal attention within the documents of a sample, without a mask of sequence x sequence.

The work grows with the squares of the documents' lengths, not of the sequence length.
"""

from functools import cache
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.tensor.dealt import attend_dealt
from parallel3d.tensor.segments import Segments

_HALF = (torch.bfloat16, torch.float16)


def attend_documents(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, dropout: float, scale: float | None = None
) -> Tensor:
    """Attend within documents: q, k, v [batch, heads, seq, size] -> [batch, seq, heads, size].

    The heads of k and v divide those of q. `scale`: None means 1/sqrt(size). torch's
    variable-length kernel computes all documents at once if it can (`in_one_kernel`); otherwise
    each is computed separately. Where samples are dealt, k and v are those of the tokens here.
    """
    batch, _, seq, _ = q.shape
    # [batch * seq, heads, size]: a view, because it is the memory layout of the products before.
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    if segments.dealt is not None:
        assert dropout == 0, "samples that a context-parallel group shares have no score dropout"
        return attend_dealt(q, k, v, segments.dealt, scale).unflatten(0, (batch, seq))
    attend = _at_once if in_one_kernel(q, dropout) else _one_by_one
    return attend(q, k, v, segments, dropout, scale).unflatten(0, (batch, seq))


def in_one_kernel(q: Tensor, dropout: float) -> bool:
    """Return True if torch's variable-length flash attention (Ampere or newer) supports q."""
    fits = q.shape[-1] <= 256 and q.shape[-1] % 8 == 0 and q.dtype in _HALF and dropout == 0
    return q.device.type == "cuda" and fits and _has_kernel(q.device)


@cache
def _has_kernel(device: torch.device) -> bool:
    return (
        torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and _kernel() is not None
    )


@cache
def _kernel() -> Any:
    """Return torch's function, or None before torch 2.12 (no grouped queries)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    parameters = signature(varlen_attn).parameters
    return varlen_attn if {"enable_gqa", "window_size"} <= parameters.keys() else None


def _at_once(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, dropout: float, scale: float | None
) -> Tensor:
    bounds, longest = segments.bounds, max(segments.lengths)
    return _kernel()(
        q,
        k,
        v,
        bounds,
        bounds,
        longest,
        longest,
        scale=scale,
        window_size=(-1, 0),  # causal: itself and earlier positions
        enable_gqa=k.shape[1] != q.shape[1],
    )


def _one_by_one(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, dropout: float, scale: float | None
) -> Tensor:
    """Compute causal attention for each document separately; [tokens, heads, size]."""
    outputs = []
    for parts in zip(*(t.split(segments.lengths) for t in (q, k, v)), strict=True):
        queries, keys, values = (t.transpose(0, 1).unsqueeze(0) for t in parts)
        y = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            dropout_p=dropout,
            is_causal=True,
            scale=scale,
            enable_gqa=k.shape[1] != q.shape[1],
        )  # [1, heads, tokens of the document, size]
        outputs.append(y.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)
