"""The user's own schedule of the rate, at the user's own length, whose rates are compared."""

from parallel3d.base.errors import ConfigError
from parallel3d.config import CompleteConfig, RunConfig

_ALL = 1000  # most steps of a run whose rates are all compared
_BESIDE = 50  # steps before and after each change of the schedule's form


def schedule_of(config: RunConfig, small: CompleteConfig) -> CompleteConfig:
    """Return the small config with the user's own schedule and number of steps.

    A number that only the corpus decides is taken as _ALL.
    """
    raw = small.to_dict()
    own = config.train.lr_schedule
    steps = _num_steps(config)
    warmup = own.warmup_steps if own.warmup_steps < steps else steps // 2
    decay = own.decay_steps and min(own.decay_steps, steps - warmup)
    raw["parallel3d"]["train"] |= {
        "steps": steps,
        "lr_schedule": own.model_dump() | {"warmup_steps": warmup, "decay_steps": decay},
    }
    schedule = RunConfig.from_dict(raw, "the config's schedule")
    return schedule.resolve(small.mesh.sizes.ranks).completed()


def compared_steps(schedule: CompleteConfig) -> list[int]:
    """Return the steps, counted from 0, whose rates are compared.

    They are all steps of a short run; else those beside its ends and changes, and as many between.
    """
    count = schedule.num_steps
    if count <= _ALL:
        return list(range(count))
    own = schedule.train.lr_schedule
    decay = own.decay_steps or count // 5
    steps = set(range(0, count, count // _ALL))
    for change in (0, own.warmup_steps, count - decay, count):
        steps.update(range(max(0, change - _BESIDE), min(count, change + _BESIDE)))
    return sorted(steps)


def _num_steps(config: RunConfig) -> int:
    """Return the steps of the user's run; _ALL if they are not known without the corpus."""
    if config.train.steps is not None:
        return config.train.steps
    if config.is_planned:
        return _ALL
    try:
        return config.resolve(config.mesh.sizes.ranks).train.steps or _ALL
    except ConfigError:  # the small meshes decide what can run
        return _ALL
