"""Only the last microbatch's gradient reaches the optimizer."""

from typing import Any

from parallel3d.pipeline.executor import Executor
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2026-09-09",
    source="NVIDIA/Megatron-LM#7186",
    what=(
        "Every microbatch was taken for the last one, whose reduction clears what has been "
        "added up, so only the last one's gradient reached the optimizer."
    ),
    mesh=(1, 4, 1),
    needs=("microbatches", "reduced once"),
)


def plant() -> Planted:
    """Each backward pass of a stage starts from no gradient."""

    def backward(original: Any, executor: Executor, stage: int, microbatch: int) -> None:
        for held in executor.engine.held if stage == executor._last_stage else ():
            held.parameter.grad = None
        original(executor, stage, microbatch)

    return wrapped(Executor, "_backward", backward)
