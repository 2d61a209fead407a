"""The library's attention behind the attention interface of transformers."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import AttentionInterface

from parallel3d.tensor.segments import Segments


class Call(NamedTuple):
    """A call of the attention function by a module.

    - `heads`, `kv_heads`: of all tensor-parallel ranks.
    - `key_size`, `value_size`: features of each head.
    """

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    scale: float | None
    dropout: float
    window: int | None
    softcap: float | None


_calls: ContextVar[dict[nn.Module, Call] | None] = ContextVar("calls", default=None)
_segments: ContextVar[Segments | None] = ContextVar("segments", default=None)
CORE = "parallel3d_core"
"""The attribute of an attention module that has the library's `CausalAttention`."""


@contextmanager
def recorded() -> Iterator[dict[nn.Module, Call]]:
    """Record the calls inside instead of computing attention."""
    calls: dict[nn.Module, Call] = {}
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


@contextmanager
def within(segments: Segments | None) -> Iterator[None]:
    """Attention inside stays within the documents of `segments`."""
    token = _segments.set(segments)
    try:
        yield
    finally:
        _segments.reset(token)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend causally: query, key, value [batch, heads, seq, size] -> [batch, seq, heads, size].

    The arguments are those of transformers' functions: `s_aux` [heads] are sinks. A module's window
    and scale do not change, so they are those of its `CausalAttention`.
    """
    calls = _calls.get()
    if calls is not None:
        calls[module] = Call(
            query.shape[1],
            key.shape[1],
            query.shape[3],
            value.shape[3],
            scaling,
            dropout,
            sliding_window,
            softcap,
        )
        groups = query.shape[1] // key.shape[1]
        touched = query.sum() + key.sum() + (0 if s_aux is None else s_aux.sum())
        return value.repeat_interleave(groups, 1).transpose(1, 2) + touched, None
    y = getattr(module, CORE)(query, key, value, _segments.get(), s_aux)
    return y.unflatten(-1, (query.shape[1], -1)), None


def implementation_of(chosen: type[nn.Module], name: str) -> str:
    """Return the attention of a class of transformers: `name` if it asks the interface."""
    module = sys.modules[chosen.__module__]
    if not hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return "eager"
    AttentionInterface.register(name, attend)
    return name


def is_recording() -> bool:
    """True inside of `recorded`: what modules compute has no meaning, but its shape."""
    return _calls.get() is not None
