"""A weight that is used twice has one use's gradient."""

from typing import Any

from parallel3d.tensor import output
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2026-08-06",
    source="deepspeedai/DeepSpeed#8224",
    what=(
        "Where one backward pass reaches a weight twice, the reduced gradient had one of the "
        "two shares only."
    ),
    mesh=(1, 4, 1),
    needs=("tied",),
)


def plant() -> Planted:
    """The output projection adds nothing to the gradient of the tied embedding."""

    def detached(original: Any, x: Any, weight: Any, labels: Any, **of: Any) -> Any:
        return original(x, weight.detach(), labels, **of)

    return wrapped(output, "vocab_parallel_loss", detached)
