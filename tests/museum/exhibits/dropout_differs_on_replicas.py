"""Ranks that hold the same activation drew different masks for it, and their copies of the residual
stream drifted apart.
"""

import os
from typing import Any

from parallel3d.tensor.random_key import RandomKey
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__, mesh=(1, 1, 4), needs=("dropout", "replicated activations"), kind="beside"
)


@in_place_of(RandomKey, "seed_generator")
def plant(original: Any, key: RandomKey, place: str, tp_rank: int, device: Any) -> None:
    """The seed has something of the process in it."""
    original(key, f"{place}/{os.getpid()}", tp_rank, device)
