"""Labels that were shifted when samples were cut were shifted again by the loss."""

from typing import Any

import numpy as np

from parallel3d.data.batches import Batches
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, kind="shared")


@in_place_of(Batches, "microbatch")
def plant(original: Any, batches: Batches, first_sample: int, count: int) -> Any:
    """A token learns the one after the next."""
    tokens, labels = original(batches, first_sample, count)
    return tokens, np.concatenate([labels[:, 1:], labels[:, -1:]], axis=1)
