"""Without expert parallelism the gradients below the experts lost their sum over the
tensor-parallel ranks, each of which has a part of the experts' width.
"""

from typing import Any

from parallel3d.models.moe import blocks
from tests.museum.exhibit import Exhibit, Planted, replaced

EXHIBIT = Exhibit(
    __doc__,
    "2026-08-03",
    "pytorch/torchtitan#4054",
    mesh=(1, 1, 4),
    needs=("experts", "replicated activations"),
)


def plant() -> Planted:
    """No all-reduce in the backward pass."""

    def copy(x: Any, *rest: Any) -> Any:
        return x

    return replaced(blocks, "copy_to_group", copy)
