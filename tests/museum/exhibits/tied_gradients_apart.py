"""A tied weight's two gradients are not summed."""

from dataclasses import replace
from typing import Any

from parallel3d.engine.reduction import Reduction
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2026-07-17",
    source="uw-syfi/piper#13",
    what=(
        "The two copies of a tied embedding on the first and the last stage were trained by "
        "their own gradients."
    ),
    mesh=(2, 2, 1),
    needs=("tied",),
)


def plant() -> Planted:
    """The owners of a tied weight do not sum its gradients."""

    def sum_some(original: Any, reduction: Reduction, held: Any) -> None:
        original(reduction, [replace(h, tied_across=False) for h in held])

    return wrapped(Reduction, "_sum", sum_some)
