"""Copies of the shards drew first weights of their own: only the ranks of a copy had one seed."""

from typing import Any

from parallel3d.verify import case
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2024-01-02",
    "mosaicml/llm-foundry#830",
    mesh=(1, 4, 1),
    needs=("copies",),
    kind="shared",
)


@in_place_of(case, "assemble")
def plant(original: Any, config: Any, mesh: Any, *rest: Any, seed: Any = None, **more: Any) -> Any:
    """Add the number of the copy to the seed."""
    if seed is not None:
        seed += mesh.copies.coord
    return original(config, mesh, *rest, seed=seed, **more)
