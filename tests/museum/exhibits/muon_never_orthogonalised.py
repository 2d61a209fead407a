"""At ZeRO-0 Muon's update was never orthogonalised, so matrices were trained by SGD."""

from typing import Any

from parallel3d.engine.muon import Muon
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__, "2026-09-06", "deepspeedai/DeepSpeed#8441", mesh=(1, 1, 1), needs=("Muon",)
)


@in_place_of(Muon, "_orthogonalised")
def plant(original: Any, muon: Muon, matrices: Any) -> Any:
    """The momentum itself is the update."""
    return matrices
