"""Under 1F1B a stage took no backward pass for its last, and so never summed its gradients over the
data-parallel ranks.
"""

from typing import Any

from parallel3d.engine.reduction import Reduction
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__, "2024-11-01", "huggingface/picotron#5", mesh=(2, 2, 1), needs=("ZeRO-0",)
)


@in_place_of(Reduction, "average_over_replicas")
def plant(original: Any, reduction: Reduction, held: Any) -> None:
    """The last stage's ranks keep their own gradients."""
    mesh = reduction.mesh
    if mesh.pipeline.coord == mesh.pipeline.size - 1:
        return
    original(reduction, held)
