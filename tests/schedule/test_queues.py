"""No schedule hangs in NCCL's queues, however they are cut; a planted swap does."""

from itertools import product

import pytest

from parallel3d.schedule.schedule import Action, Op, Schedule
from parallel3d.schedule.schedules import load, make_evaluation, make_schedule, names
from tests.schedule.queues import QUEUES, reordered, stuck

pytestmark = pytest.mark.pure

# By default a pipeline that does not fill, one that does, and what is left of a round.
SIZES = {
    False: (range(2, 5), (1, 2, 4), (1, 2)),
    True: ((2, 3, 4, 5, 8), (1, 2, 3, 4, 7, 8, 16), (1, 2, 3)),
}
every_schedule = pytest.mark.parametrize("name", names())


def schedules_of(name: str, full: bool) -> list[Schedule]:
    sizes = product(*SIZES[full])
    return [make_schedule(name, *size) for size in sizes if not load(name).invalid(*size)]


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
@every_schedule
def test_every_program_ends(name: str, full: bool) -> None:
    found = schedules_of(name, full)
    assert found or name not in ("gpipe", "one_f_one_b", "interleaved", "v_shape")
    for schedule in found:
        for mode in QUEUES:
            where = f"{name}, pp {schedule.pp_size}, m {schedule.num_microbatches}, {mode}"
            assert not stuck(schedule, mode), where
            assert not stuck(schedule, mode, synchronise=True), f"{where}, synchronised"
            assert not stuck(make_evaluation(schedule), mode), f"{where}, evaluation"


@every_schedule
def test_two_sends_that_change_places_hang_in_every_queue(name: str) -> None:
    """Tags match nothing: the receives stand in the old order."""
    for schedule in schedules_of(name, full=False):
        stage = min(schedule.crossings)
        if schedule.num_microbatches > 1:
            sends = [Action(Op.SEND_F, stage, microbatch) for microbatch in (0, 1)]
            bad = reordered(schedule, *sends)
            for mode in QUEUES:
                assert stuck(bad, mode), f"{name}, pp {schedule.pp_size}, {mode}"


def test_a_receive_before_the_send_that_it_depends_on_hangs_where_they_share_a_queue() -> None:
    """What flows back has a group of its own: there the order of the two does not matter."""
    schedule = make_schedule("one_f_one_b", 2, 4)
    bad = reordered(schedule, Action(Op.SEND_F, 0, 0), Action(Op.RECV_B, 0, 0))
    assert {mode for mode in QUEUES if stuck(bad, mode)} == {"pair", "eager", "block"}
