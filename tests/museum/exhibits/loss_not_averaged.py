"""The gradients of microbatches are summed, their loss is averaged."""

from typing import Any

from parallel3d.pipeline.executor import Executor
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2026-01-11",
    source="deepspeedai/DeepSpeed#7773",
    what=(
        "Under a pipeline the gradients of the microbatches were summed instead of averaged; "
        "the reported loss was right."
    ),
    mesh=(2, 2, 1),
    needs=("microbatches",),
)


def plant() -> Planted:
    """Undo the division for the backward pass alone."""

    def backward(original: Any, executor: Executor, stage: int, microbatch: int) -> None:
        if stage == executor._last_stage:
            loss = executor.flow.outputs[stage, microbatch]
            executor.flow.outputs[stage, microbatch] = loss * executor.schedule.num_microbatches
        original(executor, stage, microbatch)

    return wrapped(Executor, "_backward", backward)
