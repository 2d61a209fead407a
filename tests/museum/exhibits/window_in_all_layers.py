"""Layers of full attention had the window of the others, in exported configs, too."""

from typing import Any

from parallel3d.models.llama.spec import Config
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, needs=("windows",), kind="shared")


@in_place_of(Config, "window")
def plant(original: Any, config: Config, number: int) -> Any:
    """The type of a layer is not read."""
    return config.sliding_window
