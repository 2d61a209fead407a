"""The weighted loss was divided by the weights of each rank's own labels."""

from typing import Any

from parallel3d.pipeline import executor
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, mesh=(1, 4, 1), needs=("weighted labels",), kind="beside")


@in_place_of(executor, "all_reduce")
def plant(original: Any, x: Any, group: Any, *args: Any) -> Any:
    """Each rank takes its own sum for every rank's."""
    return x * group.size()
