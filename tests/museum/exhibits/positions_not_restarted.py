"""Learned positions run on over the borders of documents.

With rotary positions it would change nothing: there only the distance of two tokens counts.
"""

from typing import Any

from parallel3d.models.gpt.blocks import Embedding
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2025-03-15",
    source="hiyouga/LlamaFactory#7318",
    what="Packed documents did not see each other, but their positions went on counting.",
    mesh=(1, 1, 4),
    needs=("isolated documents", "learned positions"),
)


def plant() -> Planted:
    """The embedding does not hear of documents."""

    def forward(original: Any, embedding: Embedding, tokens: Any, segments: Any = None) -> Any:
        return original(embedding, tokens, None)

    return wrapped(Embedding, "forward", forward)
