"""Ranks with different activations drop the same places."""

from typing import Any

from parallel3d.tensor.dropout import Dropout
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2022-12-28",
    source="PaddlePaddle/PaddleFleetX#1005",
    what=(
        "With the sequence split over ranks, their dropout had one seed, so all parts lost "
        "the same places."
    ),
    mesh=(1, 1, 4),
    needs=("dropout",),
)


def plant() -> Planted:
    """The seed does not heed the rank."""

    def seed(original: Any, dropout: Dropout, device: Any) -> None:
        split, dropout.split_over = dropout.split_over, None
        original(dropout, device)
        dropout.split_over = split

    return wrapped(Dropout, "seed", seed)
