"""Under a pipeline the gradients of the microbatches were summed instead of averaged; the reported
loss was right.
"""

from typing import Any

from parallel3d.pipeline.executor import Executor
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__, "2026-01-11", "deepspeedai/DeepSpeed#7773", mesh=(2, 2, 1), needs=("microbatches",)
)


@in_place_of(Executor, "backward")
def plant(original: Any, executor: Executor, stage: int, microbatch: int) -> None:
    """Undo the division for the backward pass alone."""
    if stage == executor.last_stage:
        loss = executor.flow.outputs[stage, microbatch]
        executor.flow.outputs[stage, microbatch] = loss * executor.schedule.num_microbatches
    original(executor, stage, microbatch)
