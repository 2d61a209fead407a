"""Adam counts its steps from 0 after a resume."""

from typing import Any

from parallel3d.engine.states import OptimizerStates
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2026-09-04",
    source="TrenTorch/TrenTorch#187",
    what=(
        "The optimizer's step count was not in the checkpoint, so the bias correction began "
        "anew with moments of many steps."
    ),
    mesh=(1, 2, 2),
    needs=("resume",),
)


def plant() -> Planted:
    """The count that is set is 0."""

    def set_counters(original: Any, states: OptimizerStates, counters: Any) -> None:
        original(states, {**counters, "optimizer_steps": 0})

    return wrapped(OptimizerStates, "set_counters", set_counters)
