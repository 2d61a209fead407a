"""Gradients were not cleared between steps in bf16 without ZeRO, so each step also took the ones
before it.
"""

from typing import Any

from parallel3d.engine.reduction import Reduction
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    __doc__, "2026-02-09", "deepspeedai/DeepSpeed#7837", mesh=(1, 1, 1), needs=("reduced once",)
)


def plant() -> Planted:
    """Keep what a step added up, and add it to the next."""
    kept: dict[str, Any] = {}

    def sum_all(original: Any, reduction: Reduction, held: Any) -> None:
        held = list(held)
        for h in held:
            h.parameter.grad.add_(kept.get(h.name, 0.0))
            kept[h.name] = h.parameter.grad.clone()
        original(reduction, held)

    return wrapped(Reduction, "sum_partial", sum_all)
