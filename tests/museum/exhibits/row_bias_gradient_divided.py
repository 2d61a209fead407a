"""A row-parallel bias learns at a fraction of its gradient."""

from typing import Any

from parallel3d.tensor.linear import RowParallelLinear
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2026-08-26",
    source="pytorch/torchtitan#4332",
    what=(
        "Each rank added its share of the bias so that the sum was right, and with it divided "
        "the bias's gradient by their number."
    ),
    mesh=(1, 1, 4),
    needs=("biases",),
)


def plant() -> Planted:
    """The sum is right, and only this rank's share of the bias in it has a gradient."""

    def forward(original: Any, layer: RowParallelLinear, x: Any) -> Any:
        y = original(layer, x)
        if layer.bias is None:
            return y
        share = layer.bias / layer.group.size()
        return y + (share - layer.bias) + (layer.bias - share).detach()

    return wrapped(RowParallelLinear, "forward", forward)
