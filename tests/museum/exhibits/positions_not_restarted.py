"""Packed documents did not see each other, but their positions went on counting.

With rotary positions it would change nothing: there only the distance of two tokens counts.
"""

from typing import Any

from parallel3d.models.gpt.blocks import Embedding
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2025-03-15",
    "hiyouga/LlamaFactory#7318",
    mesh=(1, 1, 4),
    needs=("isolated documents", "learned positions"),
)


@in_place_of(Embedding, "forward")
def plant(original: Any, embedding: Embedding, tokens: Any, segments: Any = None) -> Any:
    """The embedding does not hear of documents."""
    return original(embedding, tokens, None)
