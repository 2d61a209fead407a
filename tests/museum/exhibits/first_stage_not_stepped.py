"""The first pipeline stage had an optimizer whose learning rate was never set."""

from typing import Any

from parallel3d.engine.engine import Engine
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, mesh=(2, 2, 1))


@in_place_of(Engine, "step")
def plant(original: Any, engine: Engine, lr: float, *rest: Any) -> Any:
    """Its learning rate is 0."""
    return original(engine, lr if engine.mesh.pipeline.coord else 0.0, *rest)
