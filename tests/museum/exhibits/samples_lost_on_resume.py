"""Progress was counted in batches of a rank, so a run that resumed with more ranks
skipped samples.
"""

from dataclasses import replace
from typing import Any

from parallel3d.checkpoint.state import RunState
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__, "2025-08-18", "huggingface/transformers#40245", mesh=(1, 2, 2), needs=("resume",)
)


@in_place_of(RunState, "position_in")
def plant(original: Any, state: RunState, saved: Any, *rest: Any) -> Any:
    """The next sample's index grows with dp."""
    restored = original(state, saved, *rest)
    was = saved["mesh"]["dp"]
    return replace(restored, next_sample=restored.next_sample * state._config.mesh.dp // was)
