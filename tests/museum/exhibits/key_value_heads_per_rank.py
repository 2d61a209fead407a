"""With fewer key/value heads than ranks, each rank trained its copy by the gradient of its own
queries.
"""

from dataclasses import replace
from typing import Any

from parallel3d.engine.reduction import Reduction
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2023-03-21",
    "bigcode-project/Megatron-LM#37",
    mesh=(1, 1, 4),
    needs=("fewer key/value heads than tp",),
)


@in_place_of(Reduction, "sum_partial")
def plant(original: Any, reduction: Reduction, held: Any) -> None:
    """Gradients of shared key/value heads are not summed over tp."""
    names = ("qkv.k_", "qkv.v_")
    own = [replace(h, partial=False) if any(n in h.name for n in names) else h for h in held]
    original(reduction, own)
