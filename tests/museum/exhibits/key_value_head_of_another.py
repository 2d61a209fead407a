"""A rank's queries attend to another rank's key/value head."""

from typing import Any

from parallel3d.tensor.linear import GroupedColumnLinear
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2026-08-07",
    source="ekzhang/jax-js#180",
    what=(
        "Key/value heads were tiled over the queries instead of repeated, so queries met the "
        "wrong ones."
    ),
    mesh=(1, 1, 4),
    needs=("fewer key/value heads than tp",),
)


def plant() -> Planted:
    """The heads go round over the ranks."""

    def rows(original: Any, layer: GroupedColumnLinear, count: int) -> Any:
        if count >= layer.group.size():
            return original(layer, count)
        start = layer.group.rank() % count * layer.head_size
        return start, start + layer.head_size

    return wrapped(GroupedColumnLinear, "_rows", rows)
