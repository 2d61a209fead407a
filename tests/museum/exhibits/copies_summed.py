"""Gradients were averaged over the ranks of a copy and summed over the copies."""

from typing import Any

from parallel3d.engine.quirks import reducing
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, mesh=(1, 4, 1), needs=("copies", "ZeRO-3", "reduced once"))


@in_place_of(reducing, "_reduce_scatter")
def plant(
    original: Any, gradients: Any, dtype: Any, group: Any, divisor: int, copies: Any = None
) -> Any:
    """Divide by the ranks of a copy alone."""
    number = copies.size if copies else 1
    return original(gradients, dtype, group, divisor // number, copies)
