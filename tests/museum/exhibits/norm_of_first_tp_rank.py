"""The norm misses what the other tp ranks hold."""

from typing import Any

from parallel3d.engine.quirks import core
from tests.museum.exhibit import Exhibit, Planted, replaced

EXHIBIT = Exhibit(
    date="2024-04-15",
    source="deepspeedai/DeepSpeed#5411",
    what=(
        "Parameters cut by tensor parallelism were taken for replicated ones, so the norm was "
        "that of the first rank's parts."
    ),
    mesh=(1, 1, 4),
)


def plant() -> Planted:
    """Nothing is marked as cut."""

    def count(held: Any) -> None:
        for h in held:
            h.parameter.model_parallel = False

    return replaced(core, "count_once", count)
