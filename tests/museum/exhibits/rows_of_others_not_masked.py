"""Tokens of other ranks add a row of the embedding."""

from typing import Any

import torch

from parallel3d.tensor import vocab
from tests.museum.exhibit import Exhibit, Planted, replaced, wrapped

EXHIBIT = Exhibit(
    date="",
    source="",
    what=(
        "A rank that does not hold a token's row of the embedding added its own first row "
        "instead of nothing."
    ),
    mesh=(1, 1, 4),
)


def plant() -> Planted:
    """No token is outside a rank's rows, for the embedding."""

    def forward(original: Any, layer: Any, tokens: Any) -> Any:
        def local(ids: Any, start: int, stop: int) -> tuple[Any, Any]:
            outside = (ids < start) | (ids >= stop)
            return (ids - start).masked_fill(outside, 0), torch.zeros_like(outside)

        with replaced(vocab, "local_ids", local):
            return original(layer, tokens)

    return wrapped(vocab.VocabParallelEmbedding, "forward", forward)
