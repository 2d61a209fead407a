"""Each microbatch's loss was divided by the number of microbatches twice, so every gradient and the
norm were that much smaller.
"""

from typing import Any

from parallel3d.pipeline.executor import Executor
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__, "2026-04-27", "areal-project/AReaL#1273", mesh=(1, 1, 1), needs=("microbatches",)
)


@in_place_of(Executor, "backward")
def plant(original: Any, executor: Executor, stage: int, microbatch: int) -> None:
    """The second division, just before the backward pass."""
    if stage == executor.last_stage:
        loss = executor.flow.outputs[stage, microbatch]
        executor.flow.outputs[stage, microbatch] = loss / executor.schedule.num_microbatches
    original(executor, stage, microbatch)
