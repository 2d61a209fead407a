"""Weight decay was read from the config and never reached the optimizer."""

from typing import Any

from parallel3d.engine.quirks import core
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, needs=("weight decay",), kind="shared")


@in_place_of(core, "param_groups")
def plant(original: Any, held: Any, ballast: Any, weight_decay: float, *args: Any) -> Any:
    """No group decays."""
    return original(held, ballast, 0.0, *args)
