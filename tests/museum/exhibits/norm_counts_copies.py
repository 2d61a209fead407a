"""With copies of the shards, the gradient norm was summed over all data-parallel ranks: each shard
counted once a copy.
"""

from typing import Any

from parallel3d.engine.engine import Engine
from tests.museum.exhibit import Exhibit, in_place_of, replaced

EXHIBIT = Exhibit(
    __doc__,
    "2025-11-10",
    "ByteDance-Seed/VeOmni#184",
    mesh=(1, 4, 1),
    needs=("copies", "ZeRO-1 or 2", "no offload"),
)


@in_place_of(Engine, "step")
def plant(original: Any, engine: Engine, lr: float, *rest: Any) -> Any:
    """The norm is summed over the replicas."""
    group = engine.mesh.replicas.group
    with replaced(engine.deepspeed.optimizer, "dp_process_group", group):
        return original(engine, lr, *rest)
