"""Experts that ranks divide among them were averaged over their own replicas alone, although the
tokens of all data-parallel ranks add to their gradients: these were ep times too large.
"""

from typing import Any

from parallel3d.engine.quirks import reducing
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2025-08-10",
    "pytorch/pytorch#160285",
    mesh=(1, 4, 1),
    needs=("divided experts", "ZeRO-3"),
)


@in_place_of(reducing, "_reduce_scatter")
def plant(
    original: Any, gradients: Any, dtype: Any, group: Any, divisor: int, copies: Any = None
) -> Any:
    """Divide by the size of the group that a gradient is summed over."""
    return original(gradients, dtype, group, group.size(), copies)
