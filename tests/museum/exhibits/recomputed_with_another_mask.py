"""Activation checkpointing did not restore the generator, so the backward pass was that of other
masks than the loss.
"""

from itertools import count
from typing import Any

from parallel3d.tensor.random_key import RandomKey
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    __doc__,
    "2026-08-14",
    "allenai/OLMo-core#828",
    mesh=(1, 1, 1),
    needs=("dropout", "recomputation"),
    kind="beside",
)


def plant() -> Planted:
    """The seed heeds how often it was asked for."""
    number = count()

    def seed(original: Any, key: RandomKey, place: str, *args: Any) -> None:
        original(key, f"{place}/{next(number)}", *args)

    return wrapped(RandomKey, "seed_generator", seed)
