"""Every data-parallel rank reads the same samples."""

from typing import Any

from parallel3d.train import feed
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="",
    source="",
    what=(
        "The sampler did not know its rank, so all data-parallel ranks trained on the same samples."
    ),
    mesh=(1, 4, 1),
)


def plant() -> Planted:
    """Each coordinate's share is the first one's."""

    def first(original: Any, start: int, microbatch: int, dp_coord: int, **sizes: int) -> Any:
        return original(start, microbatch, 0, **sizes)

    return wrapped(feed, "first_sample", first)
