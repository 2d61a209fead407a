"""A run that goes on with more ranks skips samples."""

from dataclasses import replace
from typing import Any

from parallel3d.checkpoint.state import RunState
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2025-08-18",
    source="huggingface/transformers#40245",
    what=(
        "What had been read was counted in batches of a rank, so a run that went on with more "
        "ranks skipped samples."
    ),
    mesh=(1, 2, 2),
    needs=("resume",),
)


def plant() -> Planted:
    """The next sample's index grows with dp."""

    def position(original: Any, state: RunState, saved: Any, *rest: Any) -> Any:
        found, was = original(state, saved, *rest), saved["mesh"]["dp"]
        return replace(found, next_sample=found.next_sample * state._config.mesh.dp // was)

    return wrapped(RunState, "position_in", position)
