"""What a coordinate gathers in a step, as the planner sees it, against the schedule's own list."""

import pytest

from parallel3d.plan.layers.windows import _windows, windows_of
from parallel3d.plan.setting import ActionOrder
from parallel3d.schedule.schedules import load, names, why_not
from parallel3d.schedule.sharding import with_sharding
from tests.schedule.blocking import most_gathered

pytestmark = pytest.mark.pure

ORDERS = [
    (name, pp, count, v)
    for name in names()
    for pp in (1, 2, 3)
    for count in (1, 6, 24)
    for v in (1, 2, 3)
    if not why_not(name, pp, count, v)
]


def windows(name, pp, count, v, weights):
    return tuple(windows_of(ActionOrder(name, pp, count, v), weights, coord) for coord in range(pp))


@pytest.mark.parametrize("weights", ["per_pass", "per_step"])
def test_held_windows_agree_with_the_program(weights):
    for name, pp, count, v in ORDERS:
        programs = load(name).schedule(pp, count, v).programs
        for program, held_windows in zip(
            programs, windows(name, pp, count, v, weights), strict=True
        ):
            held = [
                places
                for uses in (*held_windows.forward, *held_windows.backward)
                for places in uses
            ]
            most = most_gathered(with_sharding(program, weights, True))
            assert max(map(len, held)) == len(most), (name, pp, count, v)
            assert sum(held_windows.times) == len(held_windows.arrivals)


def test_few_microbatches_predict_many():
    for name, pp, count, v in ORDERS:
        if v > 1:
            order = ActionOrder(name, pp, count, v)
            every = tuple(_windows(order, "per_pass", coord) for coord in range(pp))
            assert windows(name, pp, count, v, "per_pass") == every, (name, pp, count, v)


def test_stage_is_gathered_again_after_other_stages():
    """Two of breadth_first's are held: the last one's passes follow each other, and the one before
    it would be sent for again as soon as it is let go of."""
    for weights, times in (("per_step", (1, 1, 1, 1)), ("per_pass", (2, 2, 1, 1))):
        for coord in windows("breadth_first", 2, 4, 4, weights):
            assert coord.times == times
    held = windows("breadth_first", 2, 4, 4, "per_pass")[0]
    assert held.forward[0] == {(0, 1)} and held.backward[3] == {(2, 3)}
    arrivals = [(a.place, a.forward, a.flight) for a in held.arrivals]
    assert arrivals == [
        (0, True, (0, 0, 0, 0)),
        (1, True, (4, 0, 0, 0)),
        (2, True, (4, 4, 0, 0)),
        (3, True, (4, 4, 4, 0)),
        (1, False, (4, 4, 0, 0)),
        (0, False, (4, 0, 0, 0)),
    ]
    assert windows("interleaved", 2, 8, 2, "per_pass")[0].times == (1, 1)
