"""The loss scale of fp16 was doubled after every step, whatever the window."""

from typing import Any

from parallel3d.engine.quirks import fp16
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, needs=("fp16",), kind="beside")


@in_place_of(fp16, "grow_scale_after_step")
def plant(original: Any, optimizer: Any) -> Any:
    """The window is one step."""
    optimizer.loss_scaler.scale_window = 1
    return original(optimizer)
