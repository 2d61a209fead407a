"""The pipeline schedules: one file each, found by file name (docs/add-a-schedule.md)."""

from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from functools import cache, lru_cache
from importlib import import_module
from itertools import product
from pkgutil import iter_modules
from typing import Protocol, cast

from parallel3d.base import user_folders
from parallel3d.base.errors import ConfigError
from parallel3d.schedule.schedule import Op, Schedule, add_communication, validate

__path__ += user_folders.from_environment(user_folders.SCHEDULES)


class ScheduleFile(Protocol):
    """The functions of a schedule file, each of (pp_size, num_microbatches, stages_per_rank).

    `bubble` is also given how many forwards a backward takes (2.0 if it is not).
    """

    schedule: Callable[[int, int, int], Schedule]  # the computes, in order
    invalid: Callable[[int, int, int], str | None]  # why it cannot be used, and what to do
    bubble: Callable[..., float]  # the closed form of the idle fraction
    peak_in_flight: Callable[[int, int, int], tuple[int, ...]]  # per rank, the closed form


def names() -> tuple[str, ...]:
    """The names of all schedules: the files of this folder, and of the user's own."""
    return tuple(sorted({module.name for module in iter_modules(__path__)}))


_MOST_STAGES = 10_000  # each is listed


@cache  # the planner asks a hundred thousand times
def load(name: str) -> ScheduleFile:
    """The schedule file called `name`; raises ConfigError, with the nearest name, without one."""
    if name not in names():
        nearest = get_close_matches(name, names(), n=1, cutoff=0.4)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ConfigError(f"no schedule {name!r}; {hint}there are {', '.join(names())}")
    return cast(ScheduleFile, import_module(f"{__name__}.{name}"))


@lru_cache(maxsize=16384)
def why_not(name: str, pp_size: int, num_microbatches: int, stages_per_rank: int) -> str | None:
    """Why the named schedule cannot be run with these sizes, and what to do; None if it can."""
    if pp_size * stages_per_rank > _MOST_STAGES:
        return f"no model has layers for more than {_MOST_STAGES:,} stages; use fewer"
    return load(name).invalid(pp_size, num_microbatches, stages_per_rank)


@cache
def splits_backward(name: str) -> bool:
    """Whether the named schedule has I and W, whose gradients add up until the step, for B."""
    file = load(name)
    few = (
        (pp, count, per_rank)
        for pp, per_rank, count in product((2, 1, 3, 4, 8), (1, 2, 3, 4, 8), range(1, 33))
        if not file.invalid(pp, count, per_rank)
    )
    sizes = next(few, None)
    # One for none of these sizes is found out by the executor, which sees its program.
    return sizes is not None and any(a.op is Op.W for a in file.schedule(*sizes).actions)


def make_schedule(
    name: str, pp_size: int, num_microbatches: int, stages_per_rank: int = 1
) -> Schedule:
    """The programs of a schedule, with communication, validated; ConfigError where none can be."""
    file = load(name)
    if reason := file.invalid(pp_size, num_microbatches, stages_per_rank):
        raise ConfigError(f"schedule {name!r}: {reason}")
    schedule = add_communication(file.schedule(pp_size, num_microbatches, stages_per_rank))
    validate(schedule)
    return schedule


def make_evaluation(schedule: Schedule) -> Schedule:
    """The forwards of a training schedule, in its order and on its placement, validated."""
    forwards = tuple(
        tuple(action for action in program if action.op == Op.F) for program in schedule.programs
    )
    name = f"{schedule.name}, forward only"
    alone = add_communication(replace(schedule, name=name, programs=forwards))
    validate(alone)
    return alone
