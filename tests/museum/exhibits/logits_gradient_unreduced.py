"""The language model head passed back each rank's share of its input's gradient without the
all-reduce.
"""

from typing import Any

from parallel3d.tensor import loss
from tests.museum.exhibit import Exhibit, in_place_of, replaced

EXHIBIT = Exhibit(
    __doc__,
    "2026-07-29",
    "NovaSky-AI/SkyRL#1886",
    mesh=(1, 1, 4),
    needs=("replicated activations",),
)


@in_place_of(loss._Loss, "backward")
def plant(original: Any, *given: Any) -> Any:
    """No all-reduce in the head's backward pass; its forward pass has them."""
    with replaced(loss, "sum_copy", lambda x, context: x):
        return original(*given)
