"""Every schedule file found, on every size for which it says that it is valid."""

import gc
import random
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import chain, product

import pytest

from parallel3d.base.errors import ConfigError, ScheduleError
from parallel3d.schedule.schedule import (
    Op,
    Schedule,
    bubble,
    peak_in_flight,
    sequence,
    simulate,
    unit_cost,
    validate,
)
from parallel3d.schedule.schedules import load, make_evaluation, make_schedule, names, why_not
from tests.schedule.blocking import runs_when_blocking

pytestmark = pytest.mark.pure

RANKS = range(1, 9)
STAGES_PER_RANK = range(1, 4)
MICROBATCHES = (1, 2, 3, 4, 5, 7, 8, 9, 16)
# By default fewer: a pipeline that does not fill, that just does, whole rounds and what is left.
FEW_RANKS = (1, 2, 3, 4)
FEW_MICROBATCHES = (1, 3, 4, 7, 8)
every_schedule = pytest.mark.parametrize(
    ("name", "full"),
    [
        pytest.param(name, full, id=name + full * "-full", marks=[pytest.mark.slow] * full)
        for name in names()
        for full in (False, True)
    ],
)


@cache
def cases(name: str, full: bool) -> tuple[tuple[tuple[int, int, int], Schedule], ...]:
    """The sizes for which the file says it is valid, with the schedule; making it validates it."""
    ranks, microbatches = (RANKS, MICROBATCHES) if full else (FEW_RANKS, FEW_MICROBATCHES)
    sizes = product(ranks, microbatches, STAGES_PER_RANK)
    gc.disable()  # a million live tuples and no cycle: collecting would take a third of the time
    try:
        return tuple((s, make_schedule(name, *s)) for s in sizes if not load(name).invalid(*s))
    finally:
        gc.freeze()
        gc.enable()


def test_schedules_of_the_folder_are_found() -> None:
    assert {"gpipe", "one_f_one_b", "interleaved", "v_shape"} <= set(names())
    for name in names():
        assert cases(name, full=False), name
    for name in ("gpipe", "one_f_one_b"):
        assert not any(load(name).invalid(p, m, 1) for p, m in product(RANKS, MICROBATCHES))


@every_schedule
def test_schedule_has_the_requested_sizes_and_ends_with_blocking_ranks(
    name: str, full: bool
) -> None:
    for (p, m, v), schedule in cases(name, full):
        assert schedule.name == name
        assert (schedule.pp_size, schedule.num_stages) == (p, p * v)
        assert Counter(schedule.pp_coord_of_stage) == dict.fromkeys(range(p), v)
        assert runs_when_blocking(schedule), (p, m, v)


@pytest.mark.parametrize("backward", [2.0, 0.75])
@every_schedule
def test_simulated_bubble_equals_the_closed_form(name: str, full: bool, backward: float) -> None:
    costs = {Op.F: 1.0, Op.B: backward, Op.I: backward / 2, Op.W: backward / 2}
    for sizes, schedule in cases(name, full):
        spans = simulate(schedule, lambda action: costs.get(action.op, 0.0))
        assert abs(bubble(spans) - load(name).bubble(*sizes, backward)) < 1e-9, sizes


def test_closed_forms_equal_those_of_the_papers() -> None:
    for p, m, v in product(RANKS, MICROBATCHES, STAGES_PER_RANK):
        assert load("gpipe").bubble(p, m, 1) == (p - 1) / (m + p - 1)
        assert load("one_f_one_b").bubble(p, m, 1) == (p - 1) / (m + p - 1)
        if m >= p:
            assert load("interleaved").bubble(p, m, v) == (p - 1) / (v * m + p - 1)


@every_schedule
def test_peak_in_flight_equals_the_closed_form(name: str, full: bool) -> None:
    for sizes, schedule in cases(name, full):
        assert peak_in_flight(schedule) == load(name).peak_in_flight(*sizes), sizes


def test_v_schedules_hold_at_most_the_peak_of_1f1b() -> None:
    for p, m in product(RANKS, MICROBATCHES):
        halves = load("v_shape").peak_in_flight(p, m, 2)
        assert max(halves) <= 2 * max(load("one_f_one_b").peak_in_flight(p, m, 1))
        assert m < 2 * p or set(halves) == {2 * p}
        assert load("v_shape").bubble(p, m, 2) <= load("one_f_one_b").bubble(p, m, 1)


@every_schedule
def test_evaluation_has_only_forwards_on_the_same_placement(name: str, full: bool) -> None:
    for sizes, schedule in cases(name, full):
        evaluation = make_evaluation(schedule)  # validated
        assert evaluation.pp_coord_of_stage == schedule.pp_coord_of_stage
        for alone, program in zip(evaluation.programs, schedule.programs, strict=True):
            computes = [action for action in alone if action.is_compute]
            assert computes == [action for action in program if action.op == Op.F], sizes
        assert peak_in_flight(evaluation) == (0,) * schedule.pp_size
        assert runs_when_blocking(evaluation), sizes


def corrupt(schedule: Schedule, kind: str, draw: random.Random) -> Schedule:
    """The schedule with one thing wrong, or at least different."""
    programs = [list(program) for program in schedule.programs]
    mine = draw.choice([program for program in programs if len(program) > 1])
    i, j = draw.sample(range(len(mine)), 2)
    if kind == "swap sends":
        sends = [k for k, action in enumerate(mine) if action.is_send]
        if len(sends) > 1:
            i, j = draw.sample(sends, 2)
    elif kind == "swap neighbours":
        j = draw.randrange(1, len(mine))
        i = j - 1
    if kind.startswith("swap"):
        mine[i], mine[j] = mine[j], mine[i]
    elif kind == "duplicate":
        mine.insert(j, mine[i])
    else:
        action = mine.pop(i)
        if kind == "wrong rank":
            other = draw.choice([program for program in programs if program is not mine])
            other.insert(draw.randint(0, len(other)), action)
        elif kind == "move":
            mine.insert(j, action)
    return replace(schedule, programs=tuple(map(tuple, programs)))


KINDS = ("swap", "swap sends", "swap neighbours", "duplicate", "drop", "wrong rank", "move")


@pytest.mark.parametrize("name", names())
def test_corrupted_schedule_is_refused_unless_it_still_runs(name: str) -> None:
    draw = random.Random(name)
    small = [s for (p, m, _), s in cases(name, full=False) if 2 <= p <= 4 and m <= 5]
    verdicts = Counter()
    for kind in KINDS * 40:
        schedule = corrupt(draw.choice(small), kind, draw)
        try:
            validate(schedule)
            accepted = True
        except ScheduleError:
            accepted = False
        assert accepted == runs_when_blocking(schedule), f"{kind}\n{schedule.show()}"
        verdicts[accepted] += 1
    assert verdicts[True] and verdicts[False] > verdicts[True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("gpip", 2, 2),
            f"no schedule 'gpip'; did you mean 'gpipe'? choose from {', '.join(names())}",
        ),
        (
            ("gpipe", 2, 2, 2),
            "stages_per_rank=2; use stages_per_rank = 1, or the schedule 'interleaved'",
        ),
        (
            ("one_f_one_b", 2, 2, 2),
            "stages_per_rank=2; use stages_per_rank = 1, or the schedule 'interleaved'",
        ),
        (
            ("interleaved", 2, 2),
            "stages_per_rank=1; use stages_per_rank = 2 or more, or the schedule 'one_f_one_b'",
        ),
        (("v_shape", 2, 2, 3), "stages_per_rank=3; use stages_per_rank = 2"),
    ],
)
def test_impossible_sizes_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_schedule(*arguments)
    assert message in str(refusal.value)


@pytest.mark.parametrize("name", names())
def test_sequence_has_the_order_of_the_simulated_ends(name):
    """Forwards by stage, then backwards from the last stage on, where they end at once."""

    def turn(span):
        stage = span.action.stage
        is_forward = span.action.op == Op.F
        return span.end, not is_forward, stage if is_forward else -stage

    for pp, count, per_rank in product((1, 2, 4), (1, 3, 8), (1, 2, 3)):
        if not why_not(name, pp, count, per_rank):
            schedule = load(name).schedule(pp, count, per_rank)
            spans = chain.from_iterable(simulate(schedule, unit_cost))
            computes = [action for action in sequence(schedule) if action.is_compute]
            assert computes == [span.action for span in sorted(spans, key=turn)]
