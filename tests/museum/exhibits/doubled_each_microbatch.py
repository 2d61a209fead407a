"""In a group of one rank each microbatch doubles the gradient."""

from typing import Any

from parallel3d.engine.engine import Engine
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2026-08-20",
    source="NVIDIA/Megatron-LM#6660",
    what=(
        "Where a gradient buffer's data-parallel group had one rank, what had been "
        "accumulated was doubled at every microbatch."
    ),
    mesh=(2, 1, 2),
    needs=("microbatches", "reduced once"),
)


def plant() -> Planted:
    """Add what is there to itself before each backward pass, where dp is 1."""

    def backward(original: Any, engine: Engine, *args: Any, **stage: int) -> None:
        for held in engine.held if engine.mesh.size("dp") == 1 else ():
            if held.parameter.grad is not None:
                held.parameter.grad.mul_(2)
        original(engine, *args, **stage)

    return wrapped(Engine, "backward", backward)
