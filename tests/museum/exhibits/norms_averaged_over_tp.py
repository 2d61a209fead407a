"""With sequence parallelism the gradients of the norms were averaged over the ranks, of which each
had seen other tokens.
"""

from typing import Any

from parallel3d.engine.reduction import Reduction
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2024-08-13",
    "EleutherAI/gpt-neox#1259",
    mesh=(1, 1, 4),
    needs=("sequence parallelism",),
)


@in_place_of(Reduction, "sum_partial")
def plant(original: Any, reduction: Reduction, held: Any) -> None:
    """Divide by tp before the sum."""
    held = list(held)
    for h in held:
        if h.partial and "norm" in h.name:
            h.parameter.grad.div_(reduction.mesh.tensor.size)
    original(reduction, held)
