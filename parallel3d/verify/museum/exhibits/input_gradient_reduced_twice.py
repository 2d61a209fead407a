"""An input gradient is summed over tp twice."""

from typing import Any

from parallel3d.tensor import linear
from parallel3d.verify.exhibit import Exhibit, Planted, wrapped

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

    def all_reduce(original: Any, x: Any, group: Any) -> Any:
        return original(x, group) * group.size()

    return wrapped(linear, "all_reduce", all_reduce)
