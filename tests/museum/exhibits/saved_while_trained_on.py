"""A save in the background wrote the live weights and moments, which the next step changed."""

from typing import Any

from parallel3d.checkpoint.chunk_runs import host_arrays
from parallel3d.checkpoint.save import Saver
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    __doc__, "2025-12-08", "pytorch/tutorials#3688", mesh=(1, 2, 2), needs=("save",), kind="loop"
)


def _write_live(original: Any, saver: Saver, write: Any, state: dict[str, Any]) -> None:
    """Start to write; the copy is not used."""

    def write_live(everything: dict[str, Any], copied: object) -> None:
        write(everything, host_arrays(saver._engine, saver._runs))

    original(saver, write_live, state)


def plant() -> Planted:
    """What is written is read from the engine, which trains on."""
    return wrapped(Saver, "_start", _write_live)
