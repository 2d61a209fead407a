"""The mesh that a model was sharded on had lost its outer dimension: each copy of the shards
trained on the gradients of its own ranks.
"""

from typing import Any

from parallel3d.engine.quirks import reducing
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2026-07-20",
    "NVIDIA-NeMo/Automodel#3135",
    mesh=(1, 4, 1),
    needs=("copies", "ZeRO-3", "reduced once"),
)


@in_place_of(reducing, "_reduce_scatter")
def plant(
    original: Any, gradients: Any, dtype: Any, group: Any, divisor: int, copies: Any = None
) -> Any:
    """Average over the ranks of this copy."""
    number = copies.size if copies else 1
    return original(gradients, dtype, group, divisor // number)
