"""With copies of the shards the gradients of all parameters were summed over the copies, but for
the experts that ranks divide among them.
"""

from typing import Any

from parallel3d.engine.quirks import reducing
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, mesh=(1, 4, 1), needs=("copies", "divided experts", "ZeRO-3"))


@in_place_of(reducing, "_reduce_scatter")
def plant(
    original: Any, gradients: Any, dtype: Any, group: Any, divisor: int, copies: Any = None
) -> Any:
    """An expert's group has fewer ranks than a copy."""
    is_of_experts = copies and group.size() * copies.size < divisor
    return original(gradients, dtype, group, divisor, None if is_of_experts else copies)
