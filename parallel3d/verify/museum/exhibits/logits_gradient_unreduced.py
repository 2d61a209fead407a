"""The head's input gradient is a part of the sum."""

from typing import Any

from parallel3d.tensor import output
from parallel3d.verify.exhibit import Exhibit, Planted, replaced

EXHIBIT = Exhibit(
    date="2026-07-29",
    source="NovaSky-AI/SkyRL#1886",
    what=(
        "The language model head passed back each rank's share of its input's gradient "
        "without the all-reduce."
    ),
    mesh=(1, 1, 4),
    needs=("replicated activations",),
)


def plant() -> Planted:
    """A plain product instead of the parallel one."""

    def column_linear(x: Any, weights: Any, *rest: Any) -> tuple[Any, ...]:
        return tuple(x @ weight.t() for weight in weights)

    return replaced(output, "column_linear", column_linear)
