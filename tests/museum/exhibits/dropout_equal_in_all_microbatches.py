"""Every microbatch of a step drops the same places."""

from typing import Any

from parallel3d.tensor.dropout import RandomKey
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="",
    source="",
    what=(
        "The generator was seeded once a step, so all microbatches of a step had the same masks."
    ),
    mesh=(1, 1, 1),
    needs=("dropout", "microbatches"),
)


def plant() -> Planted:
    """The seed does not heed the microbatch."""

    def seed(original: Any, key: RandomKey, *args: Any) -> None:
        microbatch, key.microbatch = key.microbatch, 0
        original(key, *args)
        key.microbatch = microbatch

    return wrapped(RandomKey, "seed_generator", seed)
