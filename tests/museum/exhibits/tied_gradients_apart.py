"""The two copies of a tied embedding on the first and the last stage were trained by their own
gradients.
"""

from dataclasses import replace
from typing import Any

from parallel3d.engine.reduction import Reduction
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, "2026-07-17", "uw-syfi/piper#13", mesh=(2, 2, 1), needs=("tied",))


@in_place_of(Reduction, "sum_partial")
def plant(original: Any, reduction: Reduction, held: Any) -> None:
    """The owners of a tied weight do not sum its gradients."""
    original(reduction, [replace(h, tied_across=False) for h in held])
