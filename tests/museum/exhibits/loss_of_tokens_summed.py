"""A pipeline ran backward from the sum of the token losses and divided by their number for the log
alone, so its gradients were larger by the tokens of the batch.
"""

from typing import Any

from parallel3d.pipeline.executor import Executor
from tests.museum.exhibit import Exhibit, in_place_of

EXHIBIT = Exhibit(__doc__, "2026-04-15", "pytorch/torchtitan#2972", mesh=(2, 1, 2))


@in_place_of(Executor, "backward")
def plant(original: Any, executor: Executor, stage: int, microbatch: int) -> None:
    """The last stage's loss times its tokens, for the backward pass alone."""
    labels = executor.batch[microbatch].labels
    if stage == executor.last_stage and labels is not None:
        loss = executor.flow.outputs[stage, microbatch]
        executor.flow.outputs[stage, microbatch] = loss * labels.numel()
    original(executor, stage, microbatch)
