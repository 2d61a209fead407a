"""The state of the loss scaler was not what the checkpoint said after a resume under fp16."""

from typing import Any

from parallel3d.engine.optimizer_states import OptimizerStates
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2026-09-20",
    "huggingface/accelerate#4289",
    mesh=(1, 2, 2),
    needs=("resume", "fp16"),
    kind="beside",
)


@in_place_of(OptimizerStates, "set_counters")
def plant(original: Any, states: OptimizerStates, counters: Any) -> None:
    """The loss scale that was saved is not set."""
    original(states, {**counters, "loss_scale": None})
