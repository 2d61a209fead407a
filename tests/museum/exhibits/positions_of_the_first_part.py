"""With the sequence split over ranks, each counted the positions of its own part from 0."""

from typing import Any

from parallel3d.models.gpt import blocks
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2026-08-02",
    "vllm-project/speculators#871",
    mesh=(1, 1, 4),
    needs=("sequence parallelism", "learned positions"),
)


@in_place_of(blocks, "sequence_part")
def plant(original: Any, x: Any, group: Any, dim: int) -> Any:
    """The first part's positions on every rank."""
    return x.narrow(dim, 0, x.shape[dim] // group.size())
