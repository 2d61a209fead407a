"""With copies of the shards a gradient was divided by all ranks before it was scattered, and by
the copies again when they averaged it.
"""

from typing import Any

from parallel3d.engine.quirks import reducing
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2025-06-13",
    "pytorch/pytorch#155903",
    mesh=(1, 4, 1),
    needs=("copies", "ZeRO-3", "reduced once"),
)


@in_place_of(reducing, "_reduce_scatter")
def plant(
    original: Any, gradients: Any, dtype: Any, group: Any, divisor: int, copies: Any = None
) -> Any:
    """Divide by the copies once more."""
    number = copies.size if copies else 1
    return original(gradients, dtype, group, divisor * number, copies)
