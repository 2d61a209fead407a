"""With sequence parallelism the gradients of biases behind row-parallel layers were not summed over
the ranks.
"""

from dataclasses import replace
from typing import Any

from parallel3d.engine.reduction import Reduction
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, mesh=(1, 1, 4), needs=("sequence parallelism", "biases"))


@in_place_of(Reduction, "sum_partial")
def plant(original: Any, reduction: Reduction, held: Any) -> None:
    """Biases are not summed over tp."""
    own = [replace(h, partial=False) if h.name.endswith("output.bias") else h for h in held]
    original(reduction, own)
