"""Gradients are summed over dp and not divided."""

from typing import Any

from parallel3d.engine.reduction import Reduction
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="",
    source="",
    what=(
        "The gradients of data-parallel ranks were summed and their mean was meant, so they "
        "were larger by the group's size."
    ),
    mesh=(1, 4, 1),
    needs=("reduced once",),
)


def plant() -> Planted:
    """Each rank's share, times their number, before the mean."""

    def sum_all(original: Any, reduction: Reduction, held: Any) -> None:
        held = list(held)
        for h in held:
            h.parameter.grad.mul_(reduction._mesh.size("dp"))
        original(reduction, held)

    return wrapped(Reduction, "_sum", sum_all)
