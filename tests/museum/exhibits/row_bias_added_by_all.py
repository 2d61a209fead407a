"""A row-parallel layer's bias is added on every rank."""

from typing import Any

from parallel3d.tensor.linear import RowParallelLinear
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2023-01-23",
    source="awslabs/slapo#10",
    what=(
        "The bias of a row-parallel layer was added before the all-reduce, and so as many "
        "times as there are ranks."
    ),
    mesh=(1, 1, 4),
    needs=("biases",),
)


def plant() -> Planted:
    """Add what the other ranks would have added."""

    def forward(original: Any, layer: RowParallelLinear, x: Any) -> Any:
        y = original(layer, x)
        return y if layer.bias is None else y + layer.bias * (layer.group.size() - 1)

    return wrapped(RowParallelLinear, "forward", forward)
