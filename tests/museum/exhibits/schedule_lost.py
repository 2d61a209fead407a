"""The scheduler was not restored with the checkpoint, and the learning rate began again with its
warm-up.
"""

from typing import Any

from parallel3d.config import learning_rate
from parallel3d.engine.optimizer_states import OptimizerStates
from tests.museum.exhibit import Exhibit, Planted, all_of, wrapped

EXHIBIT = Exhibit(
    __doc__, "2025-11-04", "NVIDIA-NeMo/Automodel#763", mesh=(1, 2, 2), needs=("resume",)
)


def plant() -> Planted:
    """Steps are counted from the checkpoint."""
    begun = [0]

    def set_counters(original: Any, states: OptimizerStates, counters: Any) -> None:
        begun[0] = int(counters["optimizer_steps"])
        original(states, counters)

    def fraction(original: Any, schedule: Any, step: int, num_steps: int) -> float:
        share: float = original(schedule, max(0, step - begun[0]), num_steps)
        return share

    return all_of(
        wrapped(OptimizerStates, "set_counters", set_counters),
        wrapped(learning_rate, "fraction", fraction),
    )
