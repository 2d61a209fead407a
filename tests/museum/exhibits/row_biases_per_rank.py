"""A bias that every tp rank holds has each rank's own gradient."""

from dataclasses import replace
from typing import Any

from parallel3d.engine.reduction import Reduction
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="",
    source="",
    what=(
        "With sequence parallelism the gradients of biases behind row-parallel layers were "
        "not summed over the ranks."
    ),
    mesh=(1, 1, 4),
    needs=("sequence parallelism", "biases"),
)


def plant() -> Planted:
    """Biases are not summed over tp."""

    def sum_some(original: Any, reduction: Reduction, held: Any) -> None:
        original(
            reduction,
            [replace(h, partial=False) if h.name.endswith("output.bias") else h for h in held],
        )

    return wrapped(Reduction, "_sum", sum_some)
