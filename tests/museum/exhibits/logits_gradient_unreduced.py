"""The head's input gradient is a part of the sum."""

from typing import Any

from parallel3d.tensor import loss
from tests.museum.exhibit import Exhibit, Planted, replaced, wrapped

EXHIBIT = Exhibit(
    date="2026-07-29",
    source="NovaSky-AI/SkyRL#1886",
    what=(
        "The language model head passed back each rank's share of its input's gradient "
        "without the all-reduce."
    ),
    mesh=(1, 1, 4),
    needs=("replicated activations",),
)


def plant() -> Planted:
    """No all-reduce in the head's backward pass; its forward pass has them."""

    def backward(original: Any, *given: Any) -> Any:
        with replaced(loss, "all_reduce", lambda x, group: x):
            return original(*given)

    return wrapped(loss._Loss, "backward", backward)
