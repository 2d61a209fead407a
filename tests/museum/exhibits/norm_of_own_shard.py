"""With sharded gradients each rank took the norm of what it held, of which one shard alone was
reduced.
"""

from typing import Any

from parallel3d.engine.engine import Engine
from tests.museum.exhibit import Exhibit, in_place_of, replaced

EXHIBIT = Exhibit(
    __doc__, "2024-06-02", "karpathy/llm.c#524", mesh=(1, 4, 1), needs=("ZeRO-1 or 2", "no offload")
)


@in_place_of(Engine, "step")
def plant(original: Any, engine: Engine, lr: float, *rest: Any) -> Any:
    """The norm is summed over a group of this rank alone."""
    with replaced(engine.deepspeed.optimizer, "dp_process_group", engine.mesh.alone.group):
        return original(engine, lr, *rest)
