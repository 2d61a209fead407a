"""The norm counts a tied weight on both its stages."""

from typing import Any

from parallel3d.engine.quirks import core
from tests.museum.exhibit import Exhibit, Planted, replaced

EXHIBIT = Exhibit(
    date="2026-09-11",
    source="NVIDIA/Megatron-LM#7227",
    what=(
        "The gradient norm counted the output projection that is tied to the embedding on the "
        "last stage, too."
    ),
    mesh=(2, 2, 1),
    needs=("tied",),
)


def plant() -> Planted:
    """The copy counts like any parameter."""

    def count(held: Any) -> None:
        for h in held:
            h.parameter.model_parallel = h.cut.counts

    return replaced(core, "count_once", count)
