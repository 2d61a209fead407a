"""Gradients of microbatches were to be summed over the copies of the shards after the last one,
which a step recorded at the first one never did.
"""

from typing import Any

from parallel3d.engine.quirks import reducing
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2026-09-07",
    "pytorch/torchtitan#4505",
    mesh=(1, 4, 1),
    needs=("copies", "ZeRO-3", "reduced each microbatch"),
)


@in_place_of(reducing, "sum_over_copies")
def plant(original: Any, *args: Any) -> None:
    """Do nothing."""
