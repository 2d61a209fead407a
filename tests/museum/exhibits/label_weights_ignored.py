"""Labels that should count little or nothing in the loss counted like all others."""

from parallel3d.data.batches import Batches
from tests.museum.exhibit import Exhibit, Planted, replaced

EXHIBIT = Exhibit(__doc__, needs=("weighted labels",), kind="beside")


def plant() -> Planted:
    """No stream weighs its tokens."""
    return replaced(Batches, "weighs", property(lambda batches: False))
