"""The loss of a microbatch is divided by their number twice."""

from typing import Any

from parallel3d.pipeline.executor import Executor
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2026-04-27",
    source="areal-project/AReaL#1273",
    what=(
        "Each microbatch's loss was divided by the number of microbatches twice, so every "
        "gradient and the norm were that much smaller."
    ),
    mesh=(1, 1, 1),
    needs=("microbatches",),
)


def plant() -> Planted:
    """The second division, just before the backward pass."""

    def backward(original: Any, executor: Executor, stage: int, microbatch: int) -> None:
        if stage == executor._last_stage:
            loss = executor.flow.outputs[stage, microbatch]
            executor.flow.outputs[stage, microbatch] = loss / executor.schedule.num_microbatches
        original(executor, stage, microbatch)

    return wrapped(Executor, "_backward", backward)
