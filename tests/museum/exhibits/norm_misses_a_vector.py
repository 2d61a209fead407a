"""A vector with an entry for each head was cut over tensor-parallel ranks but not marked so
(attention sinks), and all but the first part was left out of the norm.
"""

from typing import Any

from parallel3d.engine.quirks import core
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__, "2026-09-17", "NVIDIA/Megatron-LM#7452", mesh=(1, 1, 4), needs=("cut biases",)
)


@in_place_of(core, "count_once")
def plant(original: Any, held: Any) -> None:
    """Biases of column-parallel layers are not marked as cut."""
    original(held)
    for h in held:
        if h.cut.parts and h.name.endswith("bias"):
            h.parameter.model_parallel = False
