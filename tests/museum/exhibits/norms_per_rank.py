"""A norm's gradient is each tp rank's own under sequence parallelism."""

from dataclasses import replace
from typing import Any

from parallel3d.engine.reduction import Reduction
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2025-03-04",
    source="NVIDIA/Megatron-LM#1446",
    what=(
        "With sequence parallelism each tensor-parallel rank kept its own gradient of the "
        "final norm, of its part of the tokens."
    ),
    mesh=(1, 1, 4),
    needs=("sequence parallelism",),
)


def plant() -> Planted:
    """The head's norm is not summed over tp."""

    def sum_some(original: Any, reduction: Reduction, held: Any) -> None:
        original(
            reduction,
            [replace(h, partial=False) if h.name.startswith("head.norm") else h for h in held],
        )

    return wrapped(Reduction, "_sum", sum_some)
