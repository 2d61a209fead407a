"""Accumulated gradients are divided again at each microbatch."""

from typing import Any

from parallel3d.engine.engine import Engine
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2025-09-22",
    source="pytorch/torchtitan#1733",
    what=(
        "The accumulated gradient was divided at every microbatch instead of once, so it was "
        "a moving average of them instead of their mean."
    ),
    mesh=(1, 1, 1),
    needs=("microbatches", "reduced once"),
)


def plant() -> Planted:
    """Halve what has been added up, after each backward pass."""

    def backward(original: Any, engine: Engine, *args: Any, **stage: int) -> None:
        original(engine, *args, **stage)
        for held in engine.held:
            if held.parameter.grad is not None:
                held.parameter.grad.div_(2)

    return wrapped(Engine, "backward", backward)
