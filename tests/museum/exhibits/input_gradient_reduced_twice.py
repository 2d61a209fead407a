"""A gradient that had been summed over the tensor-parallel ranks was summed again, so it was larger
by their number.
"""

from typing import Any

from parallel3d.tensor import product
from parallel3d.tensor.collectives import Pending
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2026-08-25",
    "NVIDIA/Megatron-LM#6839",
    mesh=(2, 1, 2),
    needs=("replicated activations",),
)


@in_place_of(product, "start_all_reduce")
def plant(original: Any, x: Any, group: Any, *later: Any) -> Pending:
    """The sum times the group's size."""
    return Pending(original(x, group, *later).wait() * group.size())
