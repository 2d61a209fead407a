"""A mask of ones turned the detection of packed documents off, and tokens attended to the documents
before theirs.
"""

from typing import Any

from parallel3d.tensor.attention import CausalAttention
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2026-06-14",
    "huggingface/transformers#46634",
    mesh=(1, 1, 1),
    needs=("isolated documents",),
)


@in_place_of(CausalAttention, "_attend")
def plant(original: Any, layer: Any, q: Any, k: Any, v: Any, segments: Any, sinks: Any) -> Any:
    """The plain causal mask."""
    return original(layer, q, k, v, None, sinks)
