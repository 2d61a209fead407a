"""The norm misses the parts of a vector that tp cuts."""

from typing import Any

from parallel3d.engine.quirks import core
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2026-09-17",
    source="NVIDIA/Megatron-LM#7452",
    what=(
        "A vector with an entry for each head was cut over tensor-parallel ranks but not "
        "marked so (attention sinks), and all but the first part was left out of the norm."
    ),
    mesh=(1, 1, 4),
    needs=("cut biases",),
)


def plant() -> Planted:
    """Biases of column-parallel layers are not marked as cut."""

    def count(original: Any, held: Any) -> None:
        original(held)
        for h in held:
            if h.cut.dim is not None and h.name.endswith("bias"):
                h.parameter.model_parallel = False

    return wrapped(core, "count_once", count)
