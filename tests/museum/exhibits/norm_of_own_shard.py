"""The norm counts a rank's own shard alone."""

from typing import Any

from parallel3d.engine.engine import Engine
from tests.museum.exhibit import Exhibit, Planted, replaced, wrapped

EXHIBIT = Exhibit(
    date="2024-06-02",
    source="karpathy/llm.c#524",
    what=(
        "With sharded gradients each rank took the norm of what it held, of which one shard "
        "alone was reduced."
    ),
    mesh=(1, 4, 1),
    needs=("ZeRO-1 or 2", "no offload"),
)


def plant() -> Planted:
    """The norm is summed over a group of this rank alone."""

    def step(original: Any, engine: Engine, lr: float) -> Any:
        with replaced(engine._deepspeed.optimizer, "dp_process_group", engine.mesh.group("self")):
            return original(engine, lr)

    return wrapped(Engine, "step", step)
