"""A rank that does not hold a token's row of the embedding added its own first row instead of
nothing.
"""

from typing import Any

import torch

from parallel3d.tensor import vocab
from tests.museum.exhibit import Exhibit, in_place_of, replaced

EXHIBIT = Exhibit(__doc__, mesh=(1, 1, 4))


@in_place_of(vocab.VocabParallelEmbedding, "forward")
def plant(original: Any, layer: Any, tokens: Any) -> Any:
    """No token is outside a rank's rows, for the embedding."""

    def local(ids: Any, start: int, stop: int) -> tuple[Any, Any]:
        outside = (ids < start) | (ids >= stop)
        return (ids - start).masked_fill(outside, 0), torch.zeros_like(outside)

    with replaced(vocab, "local_ids", local):
        return original(layer, tokens)
