"""The learning rate of each step, as a fraction of the optimizer's (floor 0)."""

from math import cos, pi

from parallel3d.config import LrScheduleConfig


def fraction(schedule: LrScheduleConfig, step: int, num_steps: int) -> float:
    """The factor for `step`, counted from 0, of a run of `num_steps`.

    Linear from 1/warmup_steps to 1 over the warm-up, then constant, or half a cosine that reaches
    `min_ratio` at the last step (Loshchilov & Hutter, arXiv:1608.03983, equation 5).
    """
    warmup = schedule.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if schedule.type == "constant":
        return 1.0
    done = (step + 1 - warmup) / max(1, num_steps - warmup)  # 1 at the last step
    return schedule.min_ratio + (1 - schedule.min_ratio) * (1 + cos(pi * done)) / 2
