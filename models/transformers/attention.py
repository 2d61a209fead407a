"""The library's attention behind the attention interface of transformers."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from parallel3d.models.transformers.facts import Unsupported
from parallel3d.tensor.segments import Segments


class Sight(NamedTuple):
    """The keys that a query sees, by a mask: at most those that are not after it.

    - `window`: so many, itself included; None: all.
    - `chunk`: those in its own piece of so many tokens of the sample; None: all.
    """

    window: int | None = None
    chunk: int | None = None


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
    sight: Sight
    softcap: float | None


_calls: ContextVar[dict[nn.Module, Call] | None] = ContextVar("calls", default=None)
_segments: ContextVar[Segments | None] = ContextVar("segments", default=None)
CORE = "parallel3d_core"
"""The attribute of an attention module that has the library's `CausalAttention`."""
_SIGHT = "parallel3d_sight"  # the attribute of a mask
_FAR = 2**20  # a position that is farther than any window
_HARMLESS = {  # arguments that do not change the result, if a mask comes too
    "is_causal",
    "layer_idx",
    "cache",
    "past_key_values",
    "position_ids",
    "position_embeddings",
    "cache_position",
    "cache_params",
    "output_attentions",
    "output_router_logits",
    "output_hidden_states",
    "use_cache",
    "num_items_in_batch",
}


@contextmanager
def recorded(name: str) -> Iterator[dict[nn.Module, Call]]:
    """Record the calls inside instead of computing attention.

    - `name`: the attention's, under which models also ask for masks.
    """
    calls: dict[nn.Module, Call] = {}
    token = _calls.set(calls)
    try:
        with patch.dict(AttentionMaskInterface._global_mapping, {name: _mask}):
            yield calls
    finally:
        _calls.reset(token)


def _mask(batch_size: int, q_length: int, kv_length: int, mask_function: Any, **_: Any) -> Tensor:
    """Return a mask with its `Sight` as an attribute; raises Unsupported if it is another kind.

    Outside of `recorded` there are no masks: `attend` is causal, within a window or a chunk.
    """
    mask = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool)
    setattr(mask, _SIGHT, _sight_of(mask_function))
    return mask


def _sight_of(mask_function: Any) -> Sight:
    """Return what each query sees by a mask, from the first keys of a few queries."""

    def first_of(query: int) -> int:
        return query + 1 - _width(mask_function, query)

    last = first_of(_FAR)
    if last == 0:
        return Sight()
    if first_of(_FAR - 1) == last - 1:
        return Sight(window=_FAR + 1 - last)
    chunk = last - first_of(last - 1)
    for query in (0, chunk - 1, chunk, 3 * chunk + 1, _FAR - 1):
        if first_of(query) != query // chunk * chunk:
            raise Unsupported("attends by a mask that is neither a window nor chunks")
    return Sight(chunk=chunk)


def _width(mask_function: Any, query: int) -> int:
    """Return how many keys a query sees; raises Unsupported if it is not the nearest ones."""
    here = torch.tensor(0)
    keys = torch.arange(_FAR + 8)
    try:
        seen = mask_function(here, here, torch.tensor(query), keys).expand(len(keys))
    except NotImplementedError:  # a part of the mask has no values here
        raise Unsupported("attends by a mask that depends on data") from None
    width = int(seen.sum())
    if not torch.equal(seen, (keys <= query) & (keys > query - width)):
        raise Unsupported("lets tokens attend to later ones, or not to their nearest ones")
    return width


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
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend causally: query, key, value [batch, heads, seq, size] -> [batch, seq, heads, size].

    The arguments are those of transformers' functions: `s_aux` [heads] are sinks. A module's window
    and scale do not change, so they are those of its `CausalAttention`. The window is the mask's:
    `sliding_window` repeats it for functions without masks.
    """
    calls = _calls.get()
    if calls is not None:
        _refuse(attention_mask, others)
        call = Call(
            query.shape[1],
            key.shape[1],
            query.shape[3],
            value.shape[3],
            scaling,
            dropout,
            getattr(attention_mask, _SIGHT),
            softcap,
        )
        if calls.setdefault(module, call) != call:
            raise Unsupported("attends twice in one module, in different ways")
        groups = query.shape[1] // key.shape[1]
        touched = query.sum() + key.sum() + (0 if s_aux is None else s_aux.sum())
        y = value.repeat_interleave(groups, 1).transpose(1, 2).contiguous()
        return y + touched, None
    core: Any = getattr(module, CORE)
    y = core.of_each_head(query, key, value, _segments.get(), s_aux)
    return y.contiguous(), None  # some modules view it


def _refuse(mask: Tensor | None, others: dict[str, Any]) -> None:
    """Raise Unsupported for what would change the result, and reaches the attention by this call.

    - `others`: arguments that `attend` does not know.
    """
    if mask is None:
        raise Unsupported("attends without a mask: to later tokens too")
    if not hasattr(mask, _SIGHT):
        raise Unsupported("attends by a mask of its own")
    for name, value in others.items():
        if value is not None and name not in _HARMLESS:
            raise Unsupported(f"attends with an argument that is not known ({name})")


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
