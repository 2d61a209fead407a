"""A forward pass uses the weights of the step before."""

from typing import Any

from parallel3d.engine.engine import Engine
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2024-07-25",
    source="NVIDIA/Megatron-LM#950",
    what=(
        "With the gather of new weights overlapped, layers that run in another order than "
        "they were gathered in used the weights of the step before."
    ),
    mesh=(1, 4, 1),
    needs=("ZeRO-1 or 2",),
)


def plant() -> Planted:
    """After a step the last parameters are as they were before it, until the next."""

    def step(original: Any, engine: Engine, lr: float) -> Any:
        late = [held.parameter for held in engine.held[-3:]]
        before = [parameter.data.clone() for parameter in late]
        result = original(engine, lr)
        for parameter, value in zip(late, before, strict=True):
            parameter.data.copy_(value)
        return result

    return wrapped(Engine, "step", step)
