"""No schedule hangs in NCCL's queues, however they are cut; a planted swap does."""

from collections.abc import Callable
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import product

import pytest

from parallel3d.schedule.schedule import Action, Op, Schedule
from parallel3d.schedule.schedules import load, make_evaluation, make_schedule, names

pytestmark = pytest.mark.pure

# In which queue of its rank a transfer between two coordinates stands.
QUEUES: dict[str, Callable[[int, int], object]] = {
    "pair": lambda source, target: frozenset((source, target)),  # communicators made at first use
    "eager": lambda source, target: "pp",  # one for the whole group, made at its start
    "direction": lambda source, target: target > source,  # two groups, as the mesh has
    "block": lambda source, target: "pp",  # and no action starts before the last one is over
}
TAKES = {Op.F: Op.RECV_F, Op.B: Op.RECV_B, Op.I: Op.RECV_B, Op.W: Op.W}


def stuck(schedule: Schedule, mode: str, synchronise: bool = False) -> list[Action]:
    """Actions that wait for each other in a circle, a SEND for its RECV as well; [] if it ends.

    Computes of a rank run one after another, each once what it takes has come. A transfer runs once
    the computes before it are over, and both its ends are at the head of their queues.
    `synchronise`: after each backward the host waits for all that it has queued.
    """
    home = schedule.pp_coord_of_stage
    waits: dict[Action, list[Action]] = {}
    for program in schedule.programs:
        last_of: dict[object, Action] = {}  # in each queue
        since: list[Action] = []  # since the host last waited
        waited: list[Action] = []  # the actions that it waited for then
        received: set[Action] = set()
        for action in program:
            transfer = action.other_end if action.is_receive else action
            if action.is_compute:
                queue = "compute"
                takes = action._replace(op=TAKES[action.op])
                own = [takes.other_end] if takes in received else []
            else:
                ends = home[transfer.stage], home[transfer.other_end.stage]
                queue = QUEUES[mode](*ends)
                own = [last_of["compute"]] if "compute" in last_of else []
            own += [last_of[queue]] if queue in last_of else []
            waits.setdefault(transfer, []).extend(own + waited)
            last_of[queue] = transfer
            received |= {action} if action.is_receive else set()
            since.append(transfer)
            if mode == "block" or (synchronise and action.op is Op.B):
                waited = since
                since = []
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def reordered(schedule: Schedule, first: Action, second: Action) -> Schedule:
    """The schedule in which `second` stands before `first`, which is on the same rank."""
    rank = schedule.pp_coord_of_stage[first.stage]
    program = [action for action in schedule.programs[rank] if action != second]
    program.insert(program.index(first), second)
    programs = (*schedule.programs[:rank], tuple(program), *schedule.programs[rank + 1 :])
    return replace(schedule, programs=programs)


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
    schedules = schedules_of(name, full)
    assert schedules or name not in ("gpipe", "one_f_one_b", "interleaved", "v_shape")
    for schedule in schedules:
        for mode in QUEUES:
            where = f"{name}, pp {schedule.pp_size}, m {schedule.num_microbatches}, {mode}"
            assert not stuck(schedule, mode), where
            assert not stuck(schedule, mode, synchronise=True), f"{where}, synchronised"
            assert not stuck(make_evaluation(schedule), mode), f"{where}, evaluation"


@every_schedule
def test_swapped_sends_hang_in_every_queue(name: str) -> None:
    """Tags match nothing: the receives stand in the old order."""
    for schedule in schedules_of(name, full=False):
        stage = min(schedule.crossings)
        if schedule.num_microbatches > 1:
            sends = [Action(Op.SEND_F, stage, microbatch) for microbatch in (0, 1)]
            bad = reordered(schedule, *sends)
            for mode in QUEUES:
                assert stuck(bad, mode), f"{name}, pp {schedule.pp_size}, {mode}"


def test_receive_before_its_send_hangs_in_a_shared_queue() -> None:
    """What flows back has a group of its own: there the order of the two does not matter."""
    schedule = make_schedule("one_f_one_b", 2, 4)
    bad = reordered(schedule, Action(Op.SEND_F, 0, 0), Action(Op.RECV_B, 0, 0))
    assert {mode for mode in QUEUES if stuck(bad, mode)} == {"pair", "eager", "block"}
