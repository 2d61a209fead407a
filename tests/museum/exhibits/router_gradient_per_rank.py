"""The router is whole on each tensor-parallel rank, and each trained its copy by what its own part
of the experts' width made of the weights of a token's experts.
"""

from dataclasses import replace
from typing import Any

from parallel3d.engine.reduction import Reduction
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, mesh=(1, 2, 2), needs=("experts",))


@in_place_of(Reduction, "sum_partial")
def plant(original: Any, reduction: Reduction, held: Any) -> None:
    """Gradients of routers are not summed over tp."""
    original(reduction, [replace(h, partial=h.partial and "router" not in h.name) for h in held])
