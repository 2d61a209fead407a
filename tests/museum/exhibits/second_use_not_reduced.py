"""Where one backward pass reaches a weight twice, the reduced gradient had one of the two shares
only.
"""

from typing import Any

from parallel3d.tensor import vocab
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__, "2026-08-06", "deepspeedai/DeepSpeed#8224", mesh=(1, 4, 1), needs=("tied",)
)


@in_place_of(vocab, "vocab_parallel_loss")
def plant(original: Any, x: Any, weight: Any, labels: Any, **of: Any) -> Any:
    """The output projection adds nothing to the gradient of the tied embedding."""
    return original(x, weight.detach(), labels, **of)
