"""A stage's input is overwritten by the next microbatch's."""

from typing import Any

from parallel3d.pipeline.executor import Executor
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2023-02-15",
    source="deepspeedai/DeepSpeed#2800",
    what=(
        "With one receive buffer fewer, the next microbatch's activation came to lie where a "
        "stage still needed the last one's for its backward pass."
    ),
    mesh=(2, 1, 2),
    needs=("microbatches",),
)


def plant() -> Planted:
    """After its forward pass a stage's input becomes the next microbatch's."""

    def forward(original: Any, executor: Executor, stage: int, microbatch: int) -> None:
        original(executor, stage, microbatch)
        before = executor.flow.inputs.get((stage, microbatch - 1))
        if before is not None:
            before.data.copy_(executor.flow.inputs[stage, microbatch].data)

    return wrapped(Executor, "_forward", forward)
