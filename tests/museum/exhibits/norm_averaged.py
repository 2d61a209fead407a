"""The squared norms of the ranks that hold parts of the model were averaged instead of summed."""

from typing import Any

from parallel3d.engine.engine import Engine
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, mesh=(2, 2, 1))


@in_place_of(Engine, "step")
def plant(original: Any, engine: Engine, lr: float, *rest: Any) -> Any:
    """Divide the sum over the model's ranks by their number."""
    optimizer = engine.deepspeed.optimizer
    reduce = type(optimizer)._model_parallel_all_reduce

    def average(tensor: Any, op: Any) -> None:
        reduce(optimizer, tensor, op)
        tensor.div_(engine.mesh.model.size)

    optimizer._model_parallel_all_reduce = average
    return original(engine, lr, *rest)
