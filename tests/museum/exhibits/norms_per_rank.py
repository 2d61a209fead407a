"""With sequence parallelism each tensor-parallel rank kept its own gradient of the final norm, of
its part of the tokens.
"""

from dataclasses import replace
from typing import Any

from parallel3d.engine.reduction import Reduction
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2025-03-04",
    "NVIDIA/Megatron-LM#1446",
    mesh=(1, 1, 4),
    needs=("sequence parallelism",),
)


@in_place_of(Reduction, "sum_partial")
def plant(original: Any, reduction: Reduction, held: Any) -> None:
    """The head's norm is not summed over tp."""
    own = [replace(h, partial=False) if h.name.startswith("head.norm") else h for h in held]
    original(reduction, own)
