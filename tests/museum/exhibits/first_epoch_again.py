"""The sampler lost the epoch, and the second one had the order of the first, so samples were
trained on again.
"""

from typing import Any

from parallel3d.data import batches
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, "2026-09-06", "modelscope/ms-swift#10050", mesh=(1, 1, 1), kind="shared")


@in_place_of(batches, "sample_index")
def plant(original: Any, seed: int, global_index: Any, num_samples: int) -> Any:
    """An index of a later epoch is one of the first."""
    return original(seed, global_index % num_samples, num_samples)
