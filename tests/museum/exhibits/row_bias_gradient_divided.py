"""Each rank added its share of the bias so that the sum was right, and with it divided the bias's
gradient by their number.
"""

from typing import Any

from parallel3d.tensor.linear import RowParallelLinear
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__, "2026-08-26", "pytorch/torchtitan#4332", mesh=(1, 1, 4), needs=("biases",)
)


@in_place_of(RowParallelLinear, "forward")
def plant(original: Any, layer: RowParallelLinear, x: Any) -> Any:
    """The sum is right, and only this rank's share of the bias in it has a gradient."""
    y = original(layer, x)
    if layer.bias is None:
        return y
    share = layer.bias / layer.context.group.size()
    return y + (share - layer.bias) + (layer.bias - share).detach()
