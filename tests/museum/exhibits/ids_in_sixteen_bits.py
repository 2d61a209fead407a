"""Token ids were kept in 16 bits, whatever the size of the vocabulary."""

from typing import Any

import numpy as np

from parallel3d.data.batches import Batches
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, needs=("long",), kind="size")


@in_place_of(Batches, "microbatch")
def plant(original: Any, batches: Batches, first_sample: int, count: int) -> Any:
    """Ids above 65,535 begin at 0 again."""
    return tuple(
        ids.astype(np.uint16).astype(np.int64) for ids in original(batches, first_sample, count)
    )
