"""The gradient of a loss in chunks was a partial sum on each rank, and was passed on labelled as
replicated.
"""

from typing import Any

from parallel3d.tensor import product
from parallel3d.tensor.collectives import Pending, sequence_part
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2026-05-21",
    "pytorch/torchtitan#3412",
    mesh=(1, 1, 4),
    needs=("sequence parallelism",),
)


@in_place_of(product, "start_reduce_scatter")
def plant(original: Any, x: Any, group: Any, later: bool = True) -> Any:
    """Each rank goes on with its own slice of its own part."""
    return Pending(sequence_part(x, group, -2).contiguous())
