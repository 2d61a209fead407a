"""A norm's gradients are averaged over tp instead of summed."""

from typing import Any

from parallel3d.engine.reduction import Reduction
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2024-08-13",
    source="EleutherAI/gpt-neox#1259",
    what=(
        "With sequence parallelism the gradients of the norms were averaged over the ranks, "
        "of which each had seen other tokens."
    ),
    mesh=(1, 1, 4),
    needs=("sequence parallelism",),
)


def plant() -> Planted:
    """Divide by tp before the sum."""

    def sum_all(original: Any, reduction: Reduction, held: Any) -> None:
        held = list(held)
        for h in held:
            if h.partial and "norm" in h.name:
                h.parameter.grad.div_(reduction._mesh.size("tp"))
        original(reduction, held)

    return wrapped(Reduction, "_sum", sum_all)
