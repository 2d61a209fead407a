"""Key/value heads were tiled over the queries instead of repeated, so queries met the wrong
ones.
"""

from typing import Any

from parallel3d.tensor.linear import GroupedColumnLinear
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2026-08-07",
    "ekzhang/jax-js#180",
    mesh=(1, 1, 4),
    needs=("fewer key/value heads than tp",),
)


@in_place_of(GroupedColumnLinear, "_rows")
def plant(original: Any, layer: GroupedColumnLinear, count: int) -> Any:
    """The heads go round over the ranks."""
    if count >= layer.context.group.size():
        return original(layer, count)
    start = layer.context.group.rank() % count * layer.head_size
    return start, start + layer.head_size
