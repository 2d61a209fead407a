"""Weight decay was ten times weaker than configured."""

from typing import Any

from parallel3d.engine.quirks import core
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, needs=("weight decay",), kind="shared")


@in_place_of(core, "param_groups")
def plant(original: Any, held: Any, ballast: Any, weight_decay: float, *args: Any) -> Any:
    """Each group has a tenth of its decay."""
    return original(held, ballast, weight_decay / 10, *args)
