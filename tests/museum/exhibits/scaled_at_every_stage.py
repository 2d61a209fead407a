"""The division by the number of microbatches was done again at every stage boundary, so the first
stages of a pipeline hardly learnt.
"""

from typing import Any

from parallel3d.pipeline.executor import Executor
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__, "2026-07-17", "deepspeedai/DeepSpeed#8152", mesh=(2, 2, 1), needs=("microbatches",)
)


@in_place_of(Executor, "backward")
def plant(original: Any, executor: Executor, stage: int, microbatch: int) -> None:
    """What goes to the stage before is divided once more."""
    original(executor, stage, microbatch)
    if stage > 0:
        executor.flow.gradients[stage - 1, microbatch] /= executor.schedule.num_microbatches
