"""The loss scale was raised before the gradients were divided by it, so in these steps they and
their norm were halved.
"""

from parallel3d.engine.quirks import fp16
from tests.museum.exhibit import Exhibit, Planted, replaced

EXHIBIT = Exhibit(
    __doc__,
    "2023-01-10",
    "deepspeedai/DeepSpeed#2686",
    mesh=(1, 1, 1),
    needs=("fp16",),
    kind="beside",
)


def plant() -> Planted:
    """Let DeepSpeed raise the scale where it does."""
    return replaced(fp16, "grow_scale_after_step", lambda optimizer: lambda: None)
