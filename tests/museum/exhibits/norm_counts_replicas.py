"""The norm counts what every tp rank holds on each."""

from typing import Any

from parallel3d.engine.quirks import core
from tests.museum.exhibit import Exhibit, Planted, replaced

EXHIBIT = Exhibit(
    date="2026-08-25",
    source="ROCm/TransformerEngine#715",
    what=(
        "Replicated weights were marked as tensor-parallel, and the gradient norm counted "
        "them on every rank."
    ),
    mesh=(1, 1, 4),
)


def plant() -> Planted:
    """Everything is marked as cut."""

    def count(held: Any) -> None:
        for h in held:
            h.parameter.model_parallel = not h.copy

    return replaced(core, "count_once", count)
