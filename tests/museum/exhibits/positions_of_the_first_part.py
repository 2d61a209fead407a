"""Each rank's part of the sequence begins at position 0."""

from typing import Any

from parallel3d.models.gpt import blocks
from tests.museum.exhibit import Exhibit, Planted, replaced

EXHIBIT = Exhibit(
    date="2026-08-02",
    source="vllm-project/speculators#871",
    what=("With the sequence split over ranks, each counted the positions of its own part from 0."),
    mesh=(1, 1, 4),
    needs=("sequence parallelism", "learned positions"),
)


def plant() -> Planted:
    """The first part's positions on every rank."""

    def first_part(x: Any, group: Any, dim: int) -> Any:
        return x.narrow(dim, 0, x.shape[dim] // group.size())

    return replaced(blocks, "sequence_part", first_part)
