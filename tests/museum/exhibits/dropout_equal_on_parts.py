"""With the sequence split over ranks, their dropout had one seed, so all parts lost the same
places.
"""

from typing import Any

from parallel3d.tensor.dropout import Dropout
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2022-12-28",
    "PaddlePaddle/PaddleFleetX#1005",
    mesh=(1, 1, 4),
    needs=("dropout",),
    kind="beside",
)


@in_place_of(Dropout, "seed")
def plant(original: Any, dropout: Dropout, device: Any) -> None:
    """The seed does not heed the rank."""
    split = dropout.split_over
    dropout.split_over = None
    original(dropout, device)
    dropout.split_over = split
