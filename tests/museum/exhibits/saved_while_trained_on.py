"""A save in the background wrote the live weights and moments, which the next step changed."""

from typing import Any

from parallel3d.checkpoint.chunk_runs import host_arrays
from parallel3d.checkpoint.save import Saver
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__, "2025-12-08", "pytorch/tutorials#3688", mesh=(1, 2, 2), needs=("save",), kind="loop"
)


@in_place_of(Saver, "_write")
def plant(original: Any, saver: Saver, save: Any, copied: Any) -> None:
    """What is written is read from the engine, which trains on; the copy is not used."""
    original(saver, save, [host_arrays(saver._engine, saver._files[0].runs)])
