"""Projections that add to the residual stream started as wide as all others."""

from typing import Any

from parallel3d.models import common
from parallel3d.models.llama import spec
from tests.museum.exhibit import Exhibit, Planted, all_of, wrapped

EXHIBIT = Exhibit(__doc__, kind="shared")


def plant() -> Planted:
    """Both starts are the normal one."""

    def weight_inits(original: Any, config: Any) -> Any:
        normal, _ = original(config)
        return normal, normal

    return all_of(
        wrapped(common, "weight_inits", weight_inits), wrapped(spec, "weight_inits", weight_inits)
    )
