"""The loss scale begins anew after a resume."""

from typing import Any

from parallel3d.engine.states import OptimizerStates
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2026-09-20",
    source="huggingface/accelerate#4289",
    what=(
        "The state of the loss scaler was not what the checkpoint said after a resume under fp16."
    ),
    mesh=(1, 2, 2),
    needs=("resume", "fp16"),
)


def plant() -> Planted:
    """The loss scale that was saved is not set."""

    def set_counters(original: Any, states: OptimizerStates, counters: Any) -> None:
        original(states, {**counters, "loss_scale": None})

    return wrapped(OptimizerStates, "set_counters", set_counters)
