"""Each stage divides the gradient that it passes on."""

from typing import Any

from parallel3d.pipeline.executor import Executor
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2026-07-17",
    source="deepspeedai/DeepSpeed#8152",
    what=(
        "The division by the number of microbatches was done again at every stage boundary, "
        "so the first stages of a pipeline hardly learnt."
    ),
    mesh=(2, 2, 1),
    needs=("microbatches",),
)


def plant() -> Planted:
    """What goes to the stage before is divided once more."""

    def backward(original: Any, executor: Executor, stage: int, microbatch: int) -> None:
        original(executor, stage, microbatch)
        if stage > 0:
            executor.flow.gradients[stage - 1, microbatch] /= executor.schedule.num_microbatches

    return wrapped(Executor, "_backward", backward)
