"""A stage computes with a buffer that its message has not reached."""

from typing import Any

from parallel3d.pipeline.executor import Executor
from parallel3d.schedule.schedule import Action, Op
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="",
    source="",
    what="A stage did not wait for its input, and computed with what was in the buffer.",
    mesh=(4, 1, 1),
)


def plant() -> Planted:
    """The first microbatch's input, as memory had it; it arrives unnoticed."""

    def wait(original: Any, executor: Executor, compute: Action) -> None:
        original(executor, compute)
        if compute.op is Op.F and compute.stage > 0 and compute.microbatch == 0:
            executor.flow.inputs[compute.stage, 0].zero_()

    return wrapped(Executor, "_wait", wait)
