"""The seed of dropout was shared by the whole mesh, so data-parallel ranks had the same masks for
different samples.
"""

from typing import Any

from parallel3d.tensor.random_key import RandomKey
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2026-09-09",
    "tenstorrent/tt-metal#55947",
    mesh=(1, 4, 1),
    needs=("dropout",),
    kind="beside",
)


@in_place_of(RandomKey, "seed_generator")
def plant(original: Any, key: RandomKey, *args: Any) -> None:
    """The seed does not heed the dp coordinate."""
    key.dp_coord = 0
    original(key, *args)
