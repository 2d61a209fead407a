"""Without ZeRO the gradients were divided by the size of a larger group than the one that they were
summed over.
"""

from typing import Any

from parallel3d.engine.reduction import Reduction
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__, "2024-05-21", "deepspeedai/DeepSpeed#5555", mesh=(1, 2, 2), needs=("ZeRO-0",)
)


@in_place_of(Reduction, "average_over_replicas")
def plant(original: Any, reduction: Reduction, held: Any) -> None:
    """Divide by tp, too."""
    held = list(held)
    original(reduction, held)
    for h in held:
        h.parameter.grad.div_(reduction.mesh.tensor.size)
