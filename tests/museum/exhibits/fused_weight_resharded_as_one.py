"""A fused weight is cut in another way than it was saved."""

from math import prod
from typing import Any

from parallel3d.checkpoint import load
from parallel3d.checkpoint.box import boxes_of
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2022-04-20",
    source="hpcaitech/ColossalAI#817",
    what=(
        "With another tensor-parallel size, queries, keys and values that had been cut one by "
        "one were cut as one matrix."
    ),
    mesh=(1, 2, 2),
    needs=("resume",),
)


def plant() -> Planted:
    """A rank's part of what is fused is a slice of the whole's rows."""

    def boxes(original: Any, held: Any, start: int, stop: int) -> Any:
        cut = held.cut
        if cut.dim != 1 or len(cut.global_shape) != 3:
            return original(held, start, stop)
        first = cut.group_rank * prod(cut.local_shape)
        return boxes_of(cut.global_shape, first + start, first + stop)

    return wrapped(load, "boxes_in_whole", boxes)
