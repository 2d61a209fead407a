"""With another tensor-parallel size, queries, keys and values that had been cut one by one were cut
as one matrix.
"""

from typing import Any

from parallel3d.checkpoint import load
from parallel3d.checkpoint.chunks import boxes_of
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__, "2022-04-20", "hpcaitech/ColossalAI#817", mesh=(1, 2, 2), needs=("resume",)
)


@in_place_of(load, "global_boxes")
def plant(original: Any, held: Any, start: int, stop: int) -> Any:
    """A rank's part of what is fused is a slice of the whole's rows."""
    cut = held.cut
    if len(cut.global_shape) != 3 or not cut.parts:
        return original(held, start, stop)
    fused, _, columns = cut.global_shape
    first = fused * cut.bounds[1][0] * columns
    return boxes_of(cut.global_shape, first + start, first + stop)
