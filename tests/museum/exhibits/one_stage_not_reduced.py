"""A pipeline stage never reduces its gradients over dp."""

from typing import Any

from parallel3d.engine.reduction import Reduction
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2024-11-01",
    source="huggingface/picotron#5",
    what=(
        "Under 1F1B a stage took no backward pass for its last, and so never summed its "
        "gradients over the data-parallel ranks."
    ),
    mesh=(2, 2, 1),
    needs=("ZeRO-0",),
)


def plant() -> Planted:
    """The last stage's ranks keep their own gradients."""

    def average(original: Any, reduction: Reduction, held: Any) -> None:
        mesh = reduction._mesh
        if mesh.coord("pp") == mesh.size("pp") - 1:
            return
        original(reduction, held)

    return wrapped(Reduction, "_average_over_replicas", average)
