"""A full bucket also took the layer whose own backward pass was still running."""

from typing import Any

from parallel3d.engine.reduction import Reduction
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__, mesh=(1, 4, 1), needs=("ZeRO-0", "reduced in backward", "microbatches"), kind="size"
)


@in_place_of(Reduction, "on_input_grad")
def plant(original: Any, reduction: Reduction, stage: int, index: int, grad: Any) -> None:
    """The layer before is taken for complete, which has the earlier microbatches' gradients."""
    original(reduction, stage, index - 2, grad)
