"""What NCCL's queues make of a program: whether all of its actions come to an end."""

from collections.abc import Callable
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

from parallel3d.schedule.schedule import Action, Op, Schedule

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
        waited: list[Action] = []  # what it waited for then
        received: set[Action] = set()
        for action in program:
            transfer = action.other_end if action.is_receive else action
            if action.is_compute:
                queue, takes = "compute", action._replace(op=TAKES[action.op])
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
                waited, since = since, []
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
