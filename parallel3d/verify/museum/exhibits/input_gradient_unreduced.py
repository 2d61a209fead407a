"""A column-parallel layer's input gradient is a part."""

from parallel3d.tensor import linear
from parallel3d.verify.exhibit import Exhibit, Planted, replaced

EXHIBIT = Exhibit(
    date="",
    source="",
    what=(
        "The gradient of what enters a column-parallel layer was not summed over the ranks "
        "(f's backward pass)."
    ),
    mesh=(1, 1, 4),
    needs=("replicated activations",),
)


def plant() -> Planted:
    """No all-reduce in the backward pass."""
    return replaced(linear, "all_reduce", lambda x, *rest: x)
