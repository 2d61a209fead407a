"""An input gradient is summed over tp twice."""

from typing import Any

from parallel3d.tensor import product
from parallel3d.tensor.collectives import Pending
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2026-08-25",
    source="NVIDIA/Megatron-LM#6839",
    what=(
        "A gradient that had been summed over the tensor-parallel ranks was summed again, so "
        "it was larger by their number."
    ),
    mesh=(2, 1, 2),
    needs=("replicated activations",),
)


def plant() -> Planted:
    """The sum times the group's size."""

    def start(original: Any, x: Any, group: Any, *later: Any) -> Pending:
        return Pending(original(x, group, *later).wait() * group.size())

    return wrapped(product, "start_all_reduce", start)
