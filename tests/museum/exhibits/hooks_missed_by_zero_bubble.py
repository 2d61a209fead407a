"""Zero-bubble schedules make weight gradients without the hooks that reduce them over data-parallel
ranks.
"""

from typing import Any

from parallel3d.engine.reduction import Reduction
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2025-01-10",
    "pytorch/pytorch#144530",
    mesh=(2, 2, 1),
    needs=("ZeRO-0", "weight gradients apart"),
)


@in_place_of(Reduction, "average_over_replicas")
def plant(original: Any, reduction: Reduction, held: Any) -> None:
    """Matrices, whose gradients are made apart, keep each rank's own."""
    original(reduction, [h for h in held if h.parameter.dim() < 2])
