"""The gradients of data-parallel ranks were summed and their mean was meant, so they were larger by
the group's size.
"""

from typing import Any

from parallel3d.engine.reduction import Reduction
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, mesh=(1, 4, 1), needs=("reduced once",))


@in_place_of(Reduction, "sum_partial")
def plant(original: Any, reduction: Reduction, held: Any) -> None:
    """Each rank's share, times their number, before the mean."""
    held = list(held)
    for h in held:
        h.parameter.grad.mul_(reduction.mesh.replicas.size)
    original(reduction, held)
