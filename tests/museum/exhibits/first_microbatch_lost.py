"""The first microbatch's gradient was cleared together with the last step's."""

from typing import Any

from parallel3d.pipeline.executor import Executor
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, mesh=(2, 1, 2), needs=("microbatches",))


@in_place_of(Executor, "backward")
def plant(original: Any, executor: Executor, stage: int, microbatch: int) -> None:
    """The loss of microbatch 0 has no weight in the backward pass."""
    if stage == executor.last_stage and microbatch == 0:
        loss = executor.flow.outputs[stage, microbatch]
        executor.flow.outputs[stage, microbatch] = loss * 0
    original(executor, stage, microbatch)
