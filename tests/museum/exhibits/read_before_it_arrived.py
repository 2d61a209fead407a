"""A stage did not wait for its input, and computed with what was in the buffer."""

from typing import Any

from parallel3d.pipeline.executor import Executor
from parallel3d.schedule.schedule import Action, Op
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, mesh=(4, 1, 1))


@in_place_of(Executor, "_wait")
def plant(original: Any, executor: Executor, compute: Action) -> None:
    """The first microbatch's input, as memory had it; it arrives unnoticed."""
    original(executor, compute)
    if compute.op is Op.F and compute.stage > 0 and compute.microbatch == 0:
        executor.flow.inputs[compute.stage, 0].zero_()
