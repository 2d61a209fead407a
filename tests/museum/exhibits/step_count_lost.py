"""The optimizer's step count was not in the checkpoint, so the bias correction began anew with
moments of many steps.
"""

from typing import Any

from parallel3d.engine.optimizer_states import OptimizerStates
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__, "2026-09-04", "TrenTorch/TrenTorch#187", mesh=(1, 2, 2), needs=("resume",)
)


@in_place_of(OptimizerStates, "set_counters")
def plant(original: Any, states: OptimizerStates, counters: Any) -> None:
    """The count that is set is 0."""
    original(states, {**counters, "optimizer_steps": 0})
