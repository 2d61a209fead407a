"""The loss function that divides by the number of accumulation steps was used for validation, too,
which takes one.
"""

from typing import Any

from parallel3d.pipeline.executor import Evaluator
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(
    __doc__,
    "2025-09-25",
    "pytorch/torchtitan#1759",
    mesh=(2, 1, 2),
    needs=("microbatches",),
    kind="beside",
)


@in_place_of(Evaluator, "run")
def plant(original: Any, evaluator: Evaluator, *args: Any) -> Any:
    """The losses of tokens are divided by the number of microbatches."""
    loss = original(evaluator, *args)
    if evaluator.token_losses is not None:
        evaluator.token_losses = evaluator.token_losses / evaluator.schedule.num_microbatches
    return loss
