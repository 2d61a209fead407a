"""The norm counts each data-parallel replica."""

from typing import Any

from parallel3d.engine.engine import Engine
from tests.museum.exhibit import Exhibit, Planted, replaced, wrapped

EXHIBIT = Exhibit(
    date="2025-11-10",
    source="ByteDance-Seed/VeOmni#184",
    what=("Where gradients are replicated over ranks, the norm was summed over the replicas, too."),
    mesh=(1, 4, 1),
    needs=("ZeRO-0",),
)


def plant() -> Planted:
    """The norm is summed over dp, whose ranks all hold the whole gradient."""

    def step(original: Any, engine: Engine, lr: float) -> Any:
        with replaced(engine._deepspeed.optimizer, "dp_process_group", engine.mesh.group("dp")):
            return original(engine, lr)

    return wrapped(Engine, "step", step)
