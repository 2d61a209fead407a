"""Weight gradients made apart are not reduced over dp."""

from typing import Any

from parallel3d.engine.reduction import Reduction
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2025-01-10",
    source="pytorch/pytorch#144530",
    what=(
        "Zero-bubble schedules make weight gradients without the hooks that reduce them over "
        "data-parallel ranks."
    ),
    mesh=(2, 2, 1),
    needs=("ZeRO-0", "weight gradients apart"),
)


def plant() -> Planted:
    """Matrices, whose gradients are made apart, keep each rank's own."""

    def average(original: Any, reduction: Reduction, held: Any) -> None:
        original(reduction, [h for h in held if h.parameter.dim() < 2])

    return wrapped(Reduction, "_average_over_replicas", average)
