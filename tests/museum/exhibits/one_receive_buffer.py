"""With one receive buffer fewer, the next microbatch's activation came to lie where a stage still
needed the last one's for its backward pass.
"""

from typing import Any

from parallel3d.pipeline.executor import Executor
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__, "2023-02-15", "deepspeedai/DeepSpeed#2800", mesh=(2, 1, 2), needs=("microbatches",)
)


@in_place_of(Executor, "_forward")
def plant(original: Any, executor: Executor, stage: int, microbatch: int) -> None:
    """After its forward pass a stage's input becomes the next microbatch's."""
    original(executor, stage, microbatch)
    before = executor.flow.inputs.get((stage, microbatch - 1))
    if before is not None:
        before.data.copy_(executor.flow.inputs[stage, microbatch].data)
