"""After an evaluation training has no dropout."""

from typing import Any

from parallel3d.tensor.dropout import Dropout
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2021-01-08",
    source="ThilinaRajapakse/simpletransformers#941",
    what=(
        "The model was left in evaluation mode after the first evaluation, so training went on "
        "without dropout."
    ),
    mesh=(1, 1, 1),
    needs=("dropout",),
)


def plant() -> Planted:
    """What has once been put into evaluation stays in it."""

    def train(original: Any, dropout: Dropout, mode: bool = True) -> Any:
        return original(dropout, mode and dropout.training)

    return wrapped(Dropout, "train", train)
