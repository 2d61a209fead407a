"""The generator was seeded once a step, so all microbatches of a step had the same masks."""

from typing import Any

from parallel3d.tensor.random_key import RandomKey
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, mesh=(1, 1, 1), needs=("dropout", "microbatches"), kind="beside")


@in_place_of(RandomKey, "seed_generator")
def plant(original: Any, key: RandomKey, *args: Any) -> None:
    """The seed does not heed the microbatch."""
    microbatch = key.microbatch
    key.microbatch = 0
    original(key, *args)
    key.microbatch = microbatch
