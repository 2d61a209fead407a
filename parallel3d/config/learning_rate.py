"""The learning rate of each step."""

from functools import singledispatch
from math import cos, floor, log, pi, sqrt
from typing import Any

from parallel3d.config import LrScheduleConfig, RunConfig
from parallel3d.config import scheduler as deepspeed


def rate(config: RunConfig, step: int) -> float:
    """The learning rate of `step`, counted from 0; the config must be resolved.

    By DeepSpeed's `scheduler` block if there is one, else by parallel3d.train.lr_schedule.
    """
    lr = config.optimizer.params.lr
    if config.scheduler is not None:
        return scheduled(config.scheduler.params, lr, step)
    assert config.train.steps, "resolve and with_corpus come first"
    return lr * fraction(config.train.lr_schedule, step, config.train.steps)


def fraction(schedule: LrScheduleConfig, step: int, num_steps: int) -> float:
    """The factor for `step`, counted from 0, of a run of `num_steps`.

    Linear from 1/warmup_steps to 1 over the warm-up. Then constant; or down to `min_ratio` at the
    last step, by half a cosine (Loshchilov & Hutter, arXiv:1608.03983, equation 5), in a line, or
    ("wsd") constant until the last `decay_steps`, over which it falls as 1 - sqrt(share done)
    (warm-up, stable, decay: Hu et al., arXiv:2404.06395, section 4; the square root, and a fifth
    of the run: Hägele et al., arXiv:2405.18392, section 3).
    """
    warmup = schedule.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if schedule.type == "constant":
        return 1.0
    decay = num_steps - warmup
    if schedule.type == "wsd":
        decay = min(decay, schedule.decay_steps or max(1, num_steps // 5))
    done = max(0, step + 1 - (num_steps - decay)) / max(1, decay)  # 1 at the last step
    left = {
        "cosine": (1 + cos(pi * done)) / 2,
        "linear": 1 - done,
        "wsd": 1 - sqrt(done),
    }[schedule.type]
    return schedule.min_ratio + (1 - schedule.min_ratio) * left


@singledispatch
def scheduled(params: Any, lr: float, step: int) -> float:
    """The learning rate that DeepSpeed's scheduler sets at `step`, counted from 0.

    `lr` is optimizer.params.lr. DeepSpeed calls `step()` on its scheduler after the optimizer's, so
    step 0 has the schedule's start, and step n what the formula gives for n - 1.
    """
    raise AssertionError(f"no scheduler has {type(params).__name__}")


@scheduled.register
def _warmup(params: deepspeed.WarmupLRParams, lr: float, step: int) -> float:
    low, high = params.warmup_min_lr, params.warmup_max_lr
    high = lr if high is None else high
    share = _rise(params, step)
    return low + (high - low) * (1.0 if share is None else share)


@scheduled.register
def _warmup_decay(params: deepspeed.WarmupDecayLRParams, lr: float, step: int) -> float:
    low, high = params.warmup_min_lr, params.warmup_max_lr
    high = lr if high is None else high
    share = _rise(params, step)
    if share is None:
        total = _total(params.total_num_steps)
        decay = max(1, total - _warmup_steps(params))
        share = max(0.0, (total - (step - 1)) / decay)
    return low + (high - low) * share


@scheduled.register
def _warmup_cosine(params: deepspeed.WarmupCosineLRParams, lr: float, step: int) -> float:
    if step == 0:
        return 0.0  # whatever warmup_min_ratio says
    share = _rise(params, step)
    if share is not None:
        return lr * (params.warmup_min_ratio + (1 - params.warmup_min_ratio) * share)
    warmup = _warmup_steps(params)
    done = min(1.0, (step - warmup) / max(1, _total(params.total_num_steps) - warmup))
    floor_ = params.cos_min_ratio
    return lr * (floor_ + (1 - floor_) * (1 + cos(pi * done)) / 2)


@scheduled.register
def _one_cycle(params: deepspeed.OneCycleParams, lr: float, step: int) -> float:
    up, down = params.cycle_first_step_size, params.cycle_second_step_size
    down = up if down is None else down
    low, high = params.cycle_min_lr, params.cycle_max_lr
    if step > up + down:
        if not params.decay_step_size:
            return low
        intervals = (step - up - down) / params.decay_step_size
        return low / (1 + params.decay_lr_rate * intervals)
    place, length, stairs = step % (up + down), up, params.cycle_first_stair_count
    if place > up:
        place, length = up + down - place, down
        if params.cycle_second_stair_count is not None:
            stairs = params.cycle_second_stair_count
    height = floor(place * stairs / length) / stairs if stairs else place / length
    return low + (high - low) * height


@scheduled.register
def _range_test(params: deepspeed.LRRangeTestParams, lr: float, step: int) -> float:
    intervals = step / params.lr_range_test_step_size
    if params.lr_range_test_staircase:
        intervals = floor(intervals)
    return params.lr_range_test_min_lr * (1 + params.lr_range_test_step_rate * intervals)


def _rise(
    params: deepspeed.WarmupLRParams | deepspeed.WarmupCosineLRParams, step: int
) -> float | None:
    """The share of the warm-up's rise at `step`; None after the warm-up."""
    warmup = _warmup_steps(params)
    if step == 0:
        return 0.0
    if step > warmup:
        return None
    return log(step) / log(warmup) if params.warmup_type == "log" else (step - 1) / warmup


def _warmup_steps(params: deepspeed.WarmupLRParams | deepspeed.WarmupCosineLRParams) -> int:
    return max(2, params.warmup_num_steps)  # as DeepSpeed does


def _total(steps: int | str) -> int:
    assert isinstance(steps, int), 'total_num_steps is "auto": resolve and with_corpus come first'
    return steps
