"""The mean over dp divides by more ranks than it sums."""

from typing import Any

from parallel3d.engine.reduction import Reduction
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2024-05-21",
    source="deepspeedai/DeepSpeed#5555",
    what=(
        "Without ZeRO the gradients were divided by the size of a larger group than the one "
        "that they were summed over."
    ),
    mesh=(1, 2, 2),
    needs=("ZeRO-0",),
)


def plant() -> Planted:
    """Divide by tp, too."""

    def average(original: Any, reduction: Reduction, held: Any) -> None:
        held = list(held)
        original(reduction, held)
        for h in held:
            h.parameter.grad.div_(reduction._mesh.size("tp"))

    return wrapped(Reduction, "_average_over_replicas", average)
