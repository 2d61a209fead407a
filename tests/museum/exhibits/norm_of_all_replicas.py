"""Where gradients are replicated over ranks, the norm was summed over the replicas, too."""

from typing import Any

from parallel3d.engine.engine import Engine
from tests.museum.exhibit import Exhibit, in_place_of, replaced

EXHIBIT = Exhibit(
    __doc__, "2025-11-10", "ByteDance-Seed/VeOmni#184", mesh=(1, 4, 1), needs=("ZeRO-0",)
)


@in_place_of(Engine, "step")
def plant(original: Any, engine: Engine, lr: float, *rest: Any) -> Any:
    """The norm is summed over dp, whose ranks all hold the whole gradient."""
    with replaced(engine.deepspeed.optimizer, "dp_process_group", engine.mesh.shards.group):
        return original(engine, lr, *rest)
