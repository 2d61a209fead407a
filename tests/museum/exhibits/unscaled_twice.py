"""The gradient of a step's first microbatch was divided by the loss scale twice."""

from typing import Any

from parallel3d.pipeline.executor import Executor
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, needs=("fp16", "microbatches"), kind="half")


@in_place_of(Executor, "backward")
def plant(original: Any, executor: Executor, stage: int, microbatch: int) -> None:
    """The first division comes before the backward pass."""
    if stage == executor.last_stage and microbatch == 0:
        loss = executor.flow.outputs[stage, microbatch]
        executor.flow.outputs[stage, microbatch] = loss / executor.engine.loss_scale
    original(executor, stage, microbatch)
