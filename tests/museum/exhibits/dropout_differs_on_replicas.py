"""Ranks with the same activations drop different places."""

import os
from typing import Any

from parallel3d.tensor.dropout import RandomKey
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="",
    source="",
    what=(
        "Ranks that hold the same activation drew different masks for it, and their copies of "
        "the residual stream drifted apart."
    ),
    mesh=(1, 1, 4),
    needs=("dropout", "replicated activations"),
)


def plant() -> Planted:
    """The seed has something of the process in it."""

    def seed(original: Any, key: RandomKey, place: str, tp_rank: int, device: Any) -> None:
        original(key, f"{place}/{os.getpid()}", tp_rank, device)

    return wrapped(RandomKey, "seed_generator", seed)
