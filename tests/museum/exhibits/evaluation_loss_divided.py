"""The loss function that divides by the number of accumulation steps was used for validation, too,
which takes one.
"""

from typing import Any

from parallel3d.pipeline.executor import Executor
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2025-09-25",
    "pytorch/torchtitan#1759",
    mesh=(2, 1, 2),
    needs=("microbatches",),
    kind="beside",
)


@in_place_of(Executor, "run")
def plant(original: Any, executor: Executor, *args: Any) -> Any:
    """The losses of tokens are divided by the number of microbatches."""
    loss = original(executor, *args)
    if executor.token_losses is not None:
        executor.token_losses = executor.token_losses / executor.schedule.num_microbatches
    return loss
