"""Attention crosses the borders of documents."""

from typing import Any

from parallel3d.tensor.attention import CausalAttention
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2026-06-14",
    source="huggingface/transformers#46634",
    what=(
        "A mask of ones turned the detection of packed documents off, and tokens attended to "
        "the documents before theirs."
    ),
    mesh=(1, 1, 1),
    needs=("isolated documents",),
)


def plant() -> Planted:
    """The plain causal mask."""

    def attend(original: Any, layer: Any, q: Any, k: Any, v: Any, segments: Any) -> Any:
        return original(layer, q, k, v, None)

    return wrapped(CausalAttention, "_attend", attend)
