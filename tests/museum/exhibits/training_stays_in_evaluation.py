"""The model was left in evaluation mode after the first evaluation, so training went on without
dropout.
"""

from typing import Any

from parallel3d.tensor.dropout import Dropout
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2021-01-08",
    "ThilinaRajapakse/simpletransformers#941",
    mesh=(1, 1, 1),
    needs=("dropout",),
    kind="beside",
)


@in_place_of(Dropout, "train")
def plant(original: Any, dropout: Dropout, mode: bool = True) -> Any:
    """What has once been put into evaluation stays in it."""
    return original(dropout, mode and dropout.training)
