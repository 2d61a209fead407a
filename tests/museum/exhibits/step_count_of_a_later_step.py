"""The optimizer's step count in a checkpoint that was written in the background was that of a later
step than its weights and moments.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from parallel3d.checkpoint.save import Saver
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2026-07-21",
    "NVIDIA/nvidia-resiliency-ext#376",
    mesh=(1, 2, 2),
    needs=("save",),
    kind="loop",
)


@in_place_of(Saver, "_write")
def plant(original: Any, saver: Saver, save: Any, arrays: Iterable[Iterable[Any]]) -> None:
    """It is read when the tensors of a file are on disk."""

    def written(of_file: Iterable[Any]) -> Iterator[Any]:
        yield from of_file
        save.state.update(saver._own_state())

    original(saver, save, [written(of_file) for of_file in arrays])
