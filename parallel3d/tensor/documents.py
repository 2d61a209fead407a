"""Causal attention in which documents that share a sample do not see each other.

No mask of sequence x sequence is made: what is computed grows with the squares of the documents.
"""

from functools import cache
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.tensor.segments import Segments

_HALF = (torch.bfloat16, torch.float16)


def attend_documents(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, dropout: float, scale: float | None = None
) -> Tensor:
    """Attend within documents: q [batch, heads, seq, size]; k, v with a divisor of its heads.

    `scale` of the scores: None means 1/sqrt(size). Gives [batch, seq, heads, size], by torch's
    kernel for sequences of various lengths where it can (`in_one_kernel`), else one by one.
    """
    batch, _, seq, _ = q.shape
    # As the products before gave them: [batch * seq, heads, size], without a copy.
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    attend = _at_once if in_one_kernel(q, dropout) else _one_by_one
    return attend(q, k, v, segments, dropout, scale).unflatten(0, (batch, seq))


def in_one_kernel(q: Tensor, dropout: float) -> bool:
    """True if torch's variable-length flash attention (from Ampere on) takes q [..., size]."""
    fits = q.shape[-1] <= 256 and q.shape[-1] % 8 == 0 and q.dtype in _HALF and dropout == 0
    return q.device.type == "cuda" and fits and _is_there(q.device)


@cache
def _is_there(device: torch.device) -> bool:
    return (
        torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and _kernel() is not None
    )


@cache
def _kernel() -> Any:
    """torch's function; None in a torch that has it without grouped queries (before 2.12)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = signature(varlen_attn).parameters
    return varlen_attn if {"enable_gqa", "window_size"} <= known.keys() else None


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
        window_size=(-1, 0),  # itself and those before
        enable_gqa=k.shape[1] != q.shape[1],
    )


def _one_by_one(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, dropout: float, scale: float | None
) -> Tensor:
    """[tokens, heads, size]; each document's attention is a causal one of its own."""
    found = []
    for parts in zip(*(t.split(segments.lengths) for t in (q, k, v)), strict=True):
        mine, keys, values = (t.transpose(0, 1).unsqueeze(0) for t in parts)
        y = F.scaled_dot_product_attention(
            mine,
            keys,
            values,
            dropout_p=dropout,
            is_causal=True,
            scale=scale,
            enable_gqa=k.shape[1] != q.shape[1],
        )  # [1, heads, tokens of the document, size]
        found.append(y.squeeze(0).transpose(0, 1))
    return torch.cat(found)
