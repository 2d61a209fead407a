"""The gradient norm was that of each pipeline stage alone, and each stage clipped by its own."""

from typing import Any

from parallel3d.engine.engine import Engine
from tests.museum.exhibit import Exhibit, in_place_of, replaced

EXHIBIT = Exhibit(__doc__, "2024-10-01", "pytorch/torchtitan#596", mesh=(2, 2, 1))


@in_place_of(Engine, "step")
def plant(original: Any, engine: Engine, lr: float, *rest: Any) -> Any:
    """No sum over the ranks that share one copy of the model."""
    optimizer = engine.deepspeed.optimizer
    with replaced(optimizer, "_model_parallel_all_reduce", lambda tensor, op: None):
        return original(engine, lr, *rest)
