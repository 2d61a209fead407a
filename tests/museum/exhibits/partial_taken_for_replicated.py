"""A part of a gradient goes on as if it were the whole."""

from typing import Any

from parallel3d.tensor import product
from parallel3d.tensor.collectives import Pending, sequence_part
from tests.museum.exhibit import Exhibit, Planted, replaced

EXHIBIT = Exhibit(
    date="2026-05-21",
    source="pytorch/torchtitan#3412",
    what=(
        "The gradient of a loss in chunks was a partial sum on each rank, and was passed on "
        "labelled as replicated."
    ),
    mesh=(1, 1, 4),
    needs=("sequence parallelism",),
)


def plant() -> Planted:
    """Each rank goes on with its own slice of its own part."""

    def start(x: Any, group: Any, later: bool = True) -> Any:
        return Pending(sequence_part(x, group, -2).contiguous())

    return replaced(product, "start_reduce_scatter", start)
