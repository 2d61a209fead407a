"""The weights of query and key norms are replicated, and each rank's gradient was that of its own
heads alone.
"""

from dataclasses import replace
from typing import Any

from parallel3d.engine.reduction import Reduction
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__, "2026-08-19", "NVIDIA-NeMo/RL#3716", mesh=(1, 2, 2), needs=("query and key norms",)
)


@in_place_of(Reduction, "sum_partial")
def plant(original: Any, reduction: Reduction, held: Any) -> None:
    """Gradients of query and key norms are not summed over tp."""
    names = ("q_norm", "k_norm")
    own = [replace(h, partial=False) if any(n in h.name for n in names) else h for h in held]
    original(reduction, own)
