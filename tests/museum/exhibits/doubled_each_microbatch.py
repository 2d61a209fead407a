"""Where a gradient buffer's data-parallel group had one rank, what had been accumulated was doubled
at every microbatch.
"""

from typing import Any

from parallel3d.engine.engine import Engine
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2026-08-20",
    "NVIDIA/Megatron-LM#6660",
    mesh=(2, 1, 2),
    needs=("microbatches", "reduced once"),
)


@in_place_of(Engine, "backward")
def plant(original: Any, engine: Engine, *args: Any, **stage: int) -> None:
    """Add what is there to itself before each backward pass, where dp is 1."""
    for held in engine.held if engine.mesh.replicas.size == 1 else ():
        if held.parameter.grad is not None:
            held.parameter.grad.mul_(2)
    original(engine, *args, **stage)
