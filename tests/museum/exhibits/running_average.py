"""The accumulated gradient was divided at every microbatch instead of once, so it was a moving
average of them instead of their mean.
"""

from typing import Any

from parallel3d.engine.engine import Engine
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2025-09-22",
    "pytorch/torchtitan#1733",
    mesh=(1, 1, 1),
    needs=("microbatches", "reduced once"),
)


@in_place_of(Engine, "backward")
def plant(original: Any, engine: Engine, *args: Any, **stage: int) -> None:
    """Halve what has been added up, after each backward pass."""
    original(engine, *args, **stage)
    for held in engine.held:
        if held.parameter.grad is not None:
            held.parameter.grad.div_(2)
