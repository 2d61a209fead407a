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
    """The functions of a schedule file, called with (pp_size, num_microbatches, stages_per_rank).

    `bubble` has a fourth parameter, the cost of a backward in forwards (default 2.0).
    """

    schedule: Callable[[int, int, int], Schedule]  # the computes, in order
    invalid: Callable[[int, int, int], str | None]  # why it cannot be used, and a remedy
    bubble: Callable[..., float]  # the closed form of the idle fraction
    peak_in_flight: Callable[[int, int, int], tuple[int, ...]]  # per rank, the closed form


def names() -> tuple[str, ...]:
    """Return the names of all schedules: the files of this folder and of the user's folders."""
    return tuple(sorted({module.name for module in iter_modules(__path__)}))


@cache  # the planner calls it a hundred thousand times
def load(name: str) -> ScheduleFile:
    """Return the schedule file called `name`; raise ConfigError with the nearest name."""
    if name not in names():
        nearest = get_close_matches(name, names(), n=1, cutoff=0.4)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ConfigError(f"no schedule {name!r}; {hint}choose from {', '.join(names())}")
    return cast(ScheduleFile, import_module(f"{__name__}.{name}"))


@lru_cache(maxsize=16384)
def why_not(name: str, pp_size: int, num_microbatches: int, stages_per_rank: int) -> str | None:
    """Return why a schedule cannot run with these sizes, and a remedy; None if it can."""
    return load(name).invalid(pp_size, num_microbatches, stages_per_rank)


@cache
def splits_backward(name: str) -> bool:
    """Return True if the schedule has I and W in place of B; they add up until the step."""
    file = load(name)
    few = (
        (pp, count, per_rank)
        for pp, per_rank, count in product((2, 1, 3, 4, 8), (1, 2, 3, 4, 8), range(1, 33))
        if not file.invalid(pp, count, per_rank)
    )
    sizes = next(few, None)
    # For a schedule that allows none of these sizes the executor decides by its program.
    return sizes is not None and any(a.op is Op.W for a in file.schedule(*sizes).actions)


def make_schedule(
    name: str, pp_size: int, num_microbatches: int, stages_per_rank: int = 1
) -> Schedule:
    """Return a schedule with communication, validated; raise ConfigError if invalid."""
    sizes = pp_size, num_microbatches, stages_per_rank
    check_sizes(name, *sizes)
    return validate(add_communication(load(name).schedule(*sizes)))


def check_sizes(name: str, pp_size: int, num_microbatches: int, stages_per_rank: int) -> None:
    """Raise ConfigError if a schedule cannot run with these sizes."""
    if reason := load(name).invalid(pp_size, num_microbatches, stages_per_rank):
        raise ConfigError(f"schedule {name!r}: {reason}")


def make_evaluation(schedule: Schedule) -> Schedule:
    """Return the forwards of a training schedule, in order and on its ranks, validated."""
    forwards = tuple(
        tuple(action for action in program if action.op == Op.F) for program in schedule.programs
    )
    name = f"{schedule.name}, forward only"
    return validate(add_communication(replace(schedule, name=name, programs=forwards)))
