"""A query norm's gradient comes from a rank's own heads alone."""

from dataclasses import replace
from typing import Any

from parallel3d.engine.reduction import Reduction
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2026-08-19",
    source="NVIDIA-NeMo/RL#3716",
    what=(
        "The weights of query and key norms are replicated, and each rank's gradient was that "
        "of its own heads alone."
    ),
    mesh=(1, 2, 2),
    needs=("query and key norms",),
)


def plant() -> Planted:
    """Gradients of query and key norms are not summed over tp."""

    def sum_some(original: Any, reduction: Reduction, held: Any) -> None:
        original(
            reduction,
            [
                replace(h, partial=False) if "q_norm" in h.name or "k_norm" in h.name else h
                for h in held
            ],
        )

    return wrapped(Reduction, "_sum", sum_some)
