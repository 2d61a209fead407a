"""The validation loss is divided by the accumulation steps."""

from typing import Any

from parallel3d.pipeline.executor import Executor
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2025-09-25",
    source="pytorch/torchtitan#1759",
    what=(
        "The loss function that divides by the number of accumulation steps was used for "
        "validation, too, which takes one."
    ),
    mesh=(2, 1, 2),
    needs=("microbatches",),
)


def plant() -> Planted:
    """The losses of tokens are divided by the number of microbatches."""

    def run(original: Any, executor: Executor, *args: Any) -> Any:
        loss = original(executor, *args)
        if executor.token_losses is not None:
            executor.token_losses = executor.token_losses / executor.schedule.num_microbatches
        return loss

    return wrapped(Executor, "run", run)
