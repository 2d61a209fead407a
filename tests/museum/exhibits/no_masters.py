"""The optimizer updated the rounded parameters; there were no fp32 masters."""

from typing import Any

from parallel3d.engine.engine import Engine
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, needs=("bf16",), kind="half")


@in_place_of(Engine, "step")
def plant(original: Any, engine: Engine, lr: float, *rest: Any) -> Any:
    """Round the masters after each update."""
    outcome = original(engine, lr, *rest)
    for master in engine.states.masters:
        master.data.copy_(master.data.bfloat16())
    return outcome
