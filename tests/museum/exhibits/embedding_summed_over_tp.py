"""The rows of the embedding are cut over tensor-parallel ranks, and were summed over them."""

from typing import Any

from parallel3d.engine.reduction import Reduction
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, mesh=(1, 1, 4))


@in_place_of(Reduction, "sum_partial")
def plant(original: Any, reduction: Reduction, held: Any) -> None:
    """Each rank's rows get as much again from every other rank."""
    held = list(held)
    for h in held:
        if h.name.startswith("embedding.token"):
            h.parameter.grad.mul_(reduction.mesh.tensor.size)
    original(reduction, held)
