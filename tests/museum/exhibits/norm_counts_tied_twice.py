"""The gradient norm counted the output projection that is tied to the embedding on the last stage,
too.
"""

from typing import Any

from parallel3d.engine.quirks import core
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, "2026-09-11", "NVIDIA/Megatron-LM#7227", mesh=(2, 2, 1), needs=("tied",))


@in_place_of(core, "count_once")
def plant(original: Any, held: Any) -> None:
    """The copy counts like any parameter."""
    for h in held:
        h.parameter.model_parallel = h.first
