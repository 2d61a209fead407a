"""The learning rate of each step."""

from math import cos, pi, sqrt

from parallel3d.config import CompleteConfig, LrScheduleConfig
from parallel3d.config.arithmetic import lr_factor


def rate(config: CompleteConfig, step: int, sample: int = 0) -> float:
    """Return the learning rate of `step`, counted from 0.

    With train.batch_schedule it is a function of `sample`, the step's first sample: a step counts
    by its samples, and train.batch_lr adds its factor.
    """
    lr = config.optimizer.params.lr
    train = config.parallel3d.train
    if config.scheduler is not None:
        return float(config.scheduler.params.rate(lr, step))
    if not (phases := train.batch_schedule):
        return float(lr * fraction(train.lr_schedule, step, config.num_steps))
    first = phases[0][1]
    size = config.batch_size_at(sample)
    ended = (sample + size) / first
    total = config.samples_of_steps(config.num_steps) / first
    return float(lr * lr_factor(train, size) * fraction(train.lr_schedule, ended - 1, total))


def fraction(schedule: LrScheduleConfig, step: float, num_steps: float) -> float:
    """Return the factor on the learning rate at `step`, counted from 0, of `num_steps`.

    Steps of another size than the first are fractions: the step ends at `step` + 1.

    The warm-up is linear from 1/warmup_steps to 1. After it the factor is constant, or falls to
    `min_ratio` at the last step:
      cosine: half a cosine (Loshchilov & Hutter, arXiv:1608.03983, equation 5);
      linear: a straight line;
      wsd: constant, then 1 - sqrt(progress) over the last `decay_steps` (warm-up, stable, decay:
        Hu et al., arXiv:2404.06395, section 4; the square root and the default of a fifth of the
        run: Hägele et al., arXiv:2405.18392, section 3).
    """
    warmup = schedule.warmup_steps
    if step + 1 <= warmup:
        return (step + 1) / warmup
    if schedule.type == "constant":
        return 1.0
    decay = num_steps - warmup
    if schedule.type == "wsd":
        decay = min(decay, schedule.decay_steps or max(1, num_steps // 5))
    # 1 at the last step; samples that were left out come on top.
    progress = min(1.0, max(0, step + 1 - (num_steps - decay)) / max(1, decay))
    height = {
        "cosine": (1 + cos(pi * progress)) / 2,
        "linear": 1 - progress,
        "wsd": 1 - sqrt(progress),
    }[schedule.type]
    return schedule.min_ratio + (1 - schedule.min_ratio) * height
