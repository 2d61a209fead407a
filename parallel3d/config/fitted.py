"""The learning-rate schedule fitted to the length of the run."""

from typing import Any

from parallel3d.config.parallel3d_block import TrainConfig
from parallel3d.config.scheduler import TOTAL_STEPS

_WARMUP = "parallel3d.train.lr_schedule.warmup_steps"


def fit(train: TrainConfig, scheduler: Any) -> tuple[TrainConfig, Any, list[str]]:
    """`train` and DeepSpeed's `scheduler` (or None) for train.steps steps, with a note on a change.

    A warm-up that is longer than the run ends with it, or where the decay begins; a scheduler's
    length "auto" becomes the run's. Without train.steps nothing changes.
    """
    steps, notes = train.steps, []
    if steps is None:
        return train, scheduler, []
    schedule = train.lr_schedule
    if schedule.warmup_steps > steps:
        decay = schedule.decay_steps or 0
        room = steps - decay if decay < steps else steps
        notes.append(_note(_WARMUP, schedule.warmup_steps, steps, room))
        schedule = schedule.model_copy(update={"warmup_steps": room})
        train = train.model_copy(update={"lr_schedule": schedule})
    if scheduler is not None and getattr(scheduler.params, TOTAL_STEPS, None) == "auto":
        changes = {TOTAL_STEPS: steps}
        warmup = scheduler.params.warmup_num_steps
        if warmup > steps:
            changes["warmup_num_steps"] = steps
            notes.append(_note("scheduler.params.warmup_num_steps", warmup, steps, steps))
        params = scheduler.params.model_copy(update=changes)
        scheduler = scheduler.model_copy(update={"params": params})
    return train, scheduler, notes


def _note(path: str, written: int, steps: int, room: int) -> str:
    return f"{path}: {written} is longer than the run of {steps} steps; the warm-up takes {room}"
