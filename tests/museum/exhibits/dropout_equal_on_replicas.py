"""All data-parallel ranks drop the same places."""

from typing import Any

from parallel3d.tensor.dropout import RandomKey
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2026-09-09",
    source="tenstorrent/tt-metal#55947",
    what=(
        "The seed of dropout was shared by the whole mesh, so data-parallel ranks had the "
        "same masks for different samples."
    ),
    mesh=(1, 4, 1),
    needs=("dropout",),
)


def plant() -> Planted:
    """The seed does not heed the dp coordinate."""

    def seed(original: Any, key: RandomKey, *args: Any) -> None:
        key.dp_coord = 0
        original(key, *args)

    return wrapped(RandomKey, "seed_generator", seed)
