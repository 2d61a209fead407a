"""A resumed run took its master weights from the rounded parameters."""

from typing import Any

from parallel3d.verify import case
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, mesh=(1, 2, 2), needs=("bf16", "resume"), kind="half")


@in_place_of(case, "load")
def plant(original: Any, *args: Any, engine: Any, **kwargs: Any) -> Any:
    """Round each master when it has been loaded."""
    loaded = original(*args, engine=engine, **kwargs)
    for master in engine.states.masters:
        master.data.copy_(master.data.bfloat16())
    return loaded
