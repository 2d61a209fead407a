"""A save in the background wrote the live weights and moments, which the next step changed."""

from typing import Any

from parallel3d.checkpoint.chunk_runs import host_arrays
from parallel3d.checkpoint.save import Saver
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    __doc__, "2025-12-08", "pytorch/tutorials#3688", mesh=(1, 2, 2), needs=("save",), kind="loop"
)


class _Live:
    """Takes the place of a copy."""

    def __init__(self, saver: Saver) -> None:
        self._saver = saver

    def arrays(self) -> Any:
        return host_arrays(self._saver._engine, self._saver._runs)


def plant() -> Planted:
    """Nothing is copied."""
    return wrapped(Saver, "_copy_state", lambda original, saver: _Live(saver))
