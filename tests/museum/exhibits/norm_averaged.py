"""The squares of the ranks are averaged, not summed."""

from typing import Any

from parallel3d.engine.engine import Engine
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="",
    source="",
    what=(
        "The squared norms of the ranks that hold parts of the model were averaged instead of "
        "summed."
    ),
    mesh=(2, 2, 1),
)


def plant() -> Planted:
    """Divide the sum over the model's ranks by their number."""

    def step(original: Any, engine: Engine, lr: float) -> Any:
        optimizer = engine._deepspeed.optimizer
        reduce = type(optimizer)._model_parallel_all_reduce

        def average(tensor: Any, op: Any) -> None:
            reduce(optimizer, tensor, op)
            tensor.div_(engine.mesh.size("model"))

        optimizer._model_parallel_all_reduce = average
        return original(engine, lr)

    return wrapped(Engine, "step", step)
