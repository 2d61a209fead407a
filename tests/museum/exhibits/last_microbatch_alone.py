"""Every microbatch was taken for the last one, whose reduction clears what has been added up, so
only the last one's gradient reached the optimizer.
"""

from typing import Any

from parallel3d.pipeline.executor import Executor
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2026-09-09",
    "NVIDIA/Megatron-LM#7186",
    mesh=(1, 4, 1),
    needs=("microbatches", "reduced once"),
)


@in_place_of(Executor, "backward")
def plant(original: Any, executor: Executor, stage: int, microbatch: int) -> None:
    """Each backward pass of a stage starts from no gradient."""
    for held in executor.engine.held if stage == executor.last_stage else ():
        held.parameter.grad = None
    original(executor, stage, microbatch)
