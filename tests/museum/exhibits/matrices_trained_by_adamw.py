"""Matrices that were sharded when they were built were not recognised as matrices, so AdamW
trained them instead of Muon.
"""

from typing import Any

from parallel3d.engine.quirks import core
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__, "2026-09-06", "deepspeedai/DeepSpeed#8438", mesh=(1, 1, 1), needs=("Muon",)
)


@in_place_of(core, "group_kinds")
def plant(
    original: Any, rates: Any, whole_matrices: bool = False, *rest: Any, **others: Any
) -> Any:
    """No optimizer group has matrices."""
    return original(rates, False, *rest, **others)
