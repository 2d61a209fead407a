"""A pipeline's backward pass starts from the sum over tokens."""

from typing import Any

from parallel3d.pipeline.executor import Executor
from tests.museum.exhibit import Exhibit, Planted, wrapped

EXHIBIT = Exhibit(
    date="2026-04-15",
    source="pytorch/torchtitan#2972",
    what=(
        "A pipeline ran backward from the sum of the token losses and divided by their number "
        "for the log alone, so its gradients were larger by the tokens of the batch."
    ),
    mesh=(2, 1, 2),
)


def plant() -> Planted:
    """The last stage's loss times its tokens, for the backward pass alone."""

    def backward(original: Any, executor: Executor, stage: int, microbatch: int) -> None:
        labels = executor._batch[microbatch].labels
        if stage == executor._last_stage and labels is not None:
            loss = executor.flow.outputs[stage, microbatch]
            executor.flow.outputs[stage, microbatch] = loss * labels.numel()
        original(executor, stage, microbatch)

    return wrapped(Executor, "_backward", backward)
