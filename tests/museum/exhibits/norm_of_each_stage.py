"""The norm is each pipeline stage's own."""

from typing import Any

from parallel3d.engine.engine import Engine
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2024-10-01",
    source="pytorch/torchtitan#596",
    what=(
        "The gradient norm was that of each pipeline stage alone, and each stage clipped by "
        "its own."
    ),
    mesh=(2, 2, 1),
)


def plant() -> Planted:
    """No sum over the ranks that share one copy of the model."""

    def step(original: Any, engine: Engine, lr: float) -> Any:
        engine._deepspeed.optimizer._model_parallel_all_reduce = lambda tensor, op: None
        return original(engine, lr)

    return wrapped(Engine, "step", step)
