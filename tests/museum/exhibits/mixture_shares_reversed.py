"""The shares of a mixture were given to its parts in reverse order."""

from typing import Any

from parallel3d.data import batches
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, needs=("mixture",), kind="beside")


@in_place_of(batches, "Mixing")
def plant(original: Any, weights: Any, *changes: Any) -> Any:
    """The first part has the last part's share."""
    return original(tuple(reversed(weights)), *changes)
