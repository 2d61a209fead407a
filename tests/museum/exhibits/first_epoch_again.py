"""Every epoch has the order of the first."""

from typing import Any

from parallel3d.data import batches
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2026-09-06",
    source="modelscope/ms-swift#10050",
    what=(
        "The sampler lost the epoch, and the second one had the order of the first, so "
        "samples were trained on again."
    ),
    mesh=(1, 1, 1),
)


def plant() -> Planted:
    """An index of a later epoch is one of the first."""

    def index(original: Any, seed: int, global_index: Any, num_samples: int) -> Any:
        return original(seed, global_index % num_samples, num_samples)

    return wrapped(batches, "sample_index", index)
