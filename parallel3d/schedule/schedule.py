"""Pipeline schedules as data: one list of actions per rank that is drawn, checked, timed and run.

`needs` alone knows which action waits for which; a schedule file only orders the computes.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import accumulate, chain, pairwise
from typing import NoReturn

from parallel3d.base.errors import ScheduleError
from parallel3d.schedule.action import Action as Action
from parallel3d.schedule.action import Cost
from parallel3d.schedule.action import Op as Op
from parallel3d.schedule.action import Span as Span
from parallel3d.schedule.action import Spans as Spans
from parallel3d.schedule.action import unit_cost as unit_cost
from parallel3d.schedule.sharding import SHARDING, Weights, gathers, with_sharding


@dataclass(frozen=True)
class Schedule:
    """The rank of each stage, and the actions of each pipeline coordinate, in order."""

    name: str
    num_microbatches: int
    pp_coord_of_stage: tuple[int, ...]
    programs: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        """Number of stages of the pipeline."""
        return len(self.pp_coord_of_stage)

    @property
    def pp_size(self) -> int:
        """Number of ranks of the pipeline, one program each."""
        return len(self.programs)

    @cached_property
    def actions(self) -> frozenset[Action]:
        """All actions of all programs."""
        return frozenset(chain.from_iterable(self.programs))

    @cached_property
    def has_communication(self) -> bool:
        """True if the programs contain sends and receives."""
        return any(action.is_send or action.is_receive for action in self.actions)

    @cached_property
    def has_backward(self) -> bool:
        """True for training; a forward-only schedule evaluates."""
        return any(action.is_compute and action.op != Op.F for action in self.actions)

    @cached_property
    def gather_of(self) -> dict[Action, Action]:
        """The GATHER that each compute takes its weights from, where programs have them."""
        return gathers(self.programs)

    @cached_property
    def order(self) -> tuple[tuple[int, Action, tuple[Action, ...]], ...]:
        """All (coordinate, action, its needs), in an order in which blocking ranks can run.

        A SEND also stands for its RECV. Raises ScheduleError if the ranks get stuck.
        """
        return tuple(_run(self))

    @cached_property
    def crossings(self) -> frozenset[int]:
        """The stages whose successor lives on another rank."""
        pairs = enumerate(pairwise(self.pp_coord_of_stage))
        return frozenset(stage for stage, (here, there) in pairs if here != there)

    def show(self, *marked: Action) -> str:
        """Return the programs, one line per rank, with the `marked` actions printed as >>2F0<<."""
        texts = ([f">>{a}<<" if a in marked else str(a) for a in p] for p in self.programs)
        return "\n".join(f"  rank {coord} | {' '.join(text)}" for coord, text in enumerate(texts))


def needs(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """Return the actions that must end before this one starts: the one rule of all schedules."""
    weights = schedule.gather_of.get(action)
    return (*_data(action, schedule), weights) if weights else _data(action, schedule)


def _data(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """Return the actions that produce the inputs of this one, except weights."""
    op, stage, microbatch = action
    match op:
        case Op.F if stage == 0:
            return ()
        case Op.F if schedule.has_communication and stage - 1 in schedule.crossings:
            return (Action(Op.RECV_F, stage, microbatch),)
        case Op.F:
            return (Action(Op.F, stage - 1, microbatch),)
        case Op.B | Op.I:
            own = Action(Op.F, stage, microbatch)
            if stage == schedule.num_stages - 1:
                return (own,)
            if schedule.has_communication and stage in schedule.crossings:
                return (own, Action(Op.RECV_B, stage, microbatch))
            return (own, _backward(Op.I, stage + 1, microbatch, schedule))
        case Op.W:
            return (Action(Op.I, stage, microbatch),)
        case Op.SEND_F:
            return (Action(Op.F, stage, microbatch),)
        case Op.SEND_B:
            return (_backward(Op.I, stage, microbatch, schedule),)
        case Op.RECV_F | Op.RECV_B:
            return (action.other_end,)
        case Op.REDUCE:
            return (_backward(Op.W, stage, microbatch, schedule),)
        case _:
            return ()


def _backward(part: Op, stage: int, microbatch: int, schedule: Schedule) -> Action:
    """Return the action that computes a part (I or W) of a backward: B where it is not split."""
    split = Action(part, stage, microbatch)
    return split if split in schedule.actions else Action(Op.B, stage, microbatch)


def _send_of(compute: Action, schedule: Schedule) -> Action | None:
    """Return the SEND of a compute's result to another coordinate; None if there is none."""
    op, stage, microbatch = compute
    if op == Op.F and stage in schedule.crossings:
        return Action(Op.SEND_F, stage, microbatch)
    if op in (Op.B, Op.I) and stage - 1 in schedule.crossings:
        return Action(Op.SEND_B, stage, microbatch)
    return None


def validate(schedule: Schedule) -> Schedule:
    """Return the schedule; raise ScheduleError, with the faulty action marked, if it cannot run.

    Each compute must appear once per stage and microbatch, on the stage's rank, after its needs.
    Each send must have its receive, and *blocking* transfers over one channel per pair of ranks
    (NCCL's) must end.
    """
    expected = _expected(schedule)
    counts = Counter(chain.from_iterable(schedule.programs))
    for coord, program in enumerate(schedule.programs):
        for action in program:
            if action not in expected and action.op not in SHARDING:
                _refuse(schedule, f"{action} has no purpose: nothing uses its result", action)
            if (home := schedule.pp_coord_of_stage[action.stage]) != coord:
                _refuse(schedule, f"{action} is on rank {coord}; its stage is on {home}", action)
            if counts[action] > 1 and action in expected:
                _refuse(schedule, f"{action} appears {counts[action]} times", action)
    if missing := sorted(expected - counts.keys()):
        _refuse(schedule, f"missing: {', '.join(map(str, missing))}")
    _ = schedule.order  # raises if a rank would block for ever
    return schedule


def add_communication(schedule: Schedule) -> Schedule:
    """Return a schedule of computes with SEND and RECV added, free of deadlock by construction.

    All programs are cuts of `sequence`; a RECV is posted one compute ahead, to overlap with it.
    """
    _ = schedule.order  # raises if the ranks get stuck
    programs: list[list[Action]] = [[] for _ in schedule.programs]
    for action in sequence(schedule):
        for end in (action, action.other_end) if action.is_send else (action,):
            programs[schedule.pp_coord_of_stage[end.stage]].append(end)
    return replace(schedule, programs=tuple(map(tuple, programs)))


def add_sharding(schedule: Schedule, weights: Weights, reduces_once: bool) -> Schedule:
    """Return a schedule with GATHER, RELEASE and REDUCE (`with_sharding`), validated."""
    programs = tuple(with_sharding(p, weights, reduces_once) for p in schedule.programs)
    return validate(replace(schedule, programs=programs))


def sequence(schedule: Schedule) -> Iterator[Action]:
    """Yield all computes in the order of their ends, each followed by its SEND.

    The ends are those of `simulate` with `unit_cost`, found in a third of its time. The programs
    must be valid: on ranks that get stuck, actions are left out.
    """
    assert not schedule.has_communication
    last = schedule.num_stages - 1
    ends: dict[tuple[bool, int, int], float] = {}
    waiting = [deque(program) for program in schedule.programs]
    free = [0.0] * schedule.pp_size
    turns: list[tuple[float, bool, int, Action]] = []
    moved = True
    while moved:
        moved = False
        for coord, program in enumerate(waiting):
            while program:
                action = program[0]
                op, stage, microbatch = action
                is_forward = op == Op.F
                start = free[coord]
                if op != Op.W and stage != (0 if is_forward else last):
                    before = stage - 1 if is_forward else stage + 1
                    if (is_forward, before, microbatch) not in ends:
                        break
                    start = max(start, ends[is_forward, before, microbatch])
                end = free[coord] = start + unit_cost(program.popleft())
                if op != Op.W:
                    ends[is_forward, stage, microbatch] = end
                # If computes end at the same time, the sender's comes first, so that the RECV
                # precedes the peer's compute.
                turns.append((end, not is_forward, stage if is_forward else -stage, action))
                moved = True
    for *_, action in sorted(turns):
        send = _send_of(action, schedule)
        yield from (action, send) if send else (action,)


def simulate(schedule: Schedule, cost: Cost) -> Spans:
    """Return the spans of all actions per coordinate, if action `a` takes `cost(a)` seconds.

    - A compute waits for its rank and its needs.
    - A transfer starts when both sides have reached it and their channel is free. It delays no
      compute and takes the cost of its SEND; the span of its RECV begins where it is posted.
    - GATHER and REDUCE take turns beside the computes.
    """
    free = [0.0] * schedule.pp_size
    channel_free: dict[tuple[int, int], float] = defaultdict(float)
    sharding_free = [0.0] * schedule.pp_size
    over: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule.programs]
    for coord, action, needed in schedule.order:
        start = free[coord]
        if action.is_send:
            receive = action.other_end
            peer = schedule.pp_coord_of_stage[receive.stage]
            channel = (min(coord, peer), max(coord, peer))
            start = max(start, free[peer], channel_free[channel])
            end = channel_free[channel] = over[receive] = start + cost(action)
            spans[peer].append(Span(receive, free[peer], end))
        elif action.op in SHARDING:
            start = max((start, sharding_free[coord], *map(over.__getitem__, needed)))
            end = sharding_free[coord] = over[action] = start + cost(action)
        else:
            start = max((start, *map(over.__getitem__, needed)))
            end = free[coord] = over[action] = start + cost(action)
        spans[coord].append(Span(action, start, end))
    return tuple(map(tuple, spans))


def bubble(spans: Spans) -> float:
    """Return the idle fraction of the ranks' time, from the first compute to the end of the last.

    Actions that run once a step do not count. arXiv:2104.04473, section 2.2, uses b / (1 - b).
    """
    computes = [span for rank in spans for span in rank if span.action.is_compute]
    busy = sum(span.end - span.start for span in computes)
    makespan = max(span.end for span in computes) - min(span.start for span in computes)
    return idle_fraction(busy, len(spans), makespan)


def idle_fraction(busy: float, ranks: int, makespan: float) -> float:
    """Return the bubble of ranks that compute `busy` seconds in all during `makespan`."""
    return max(0.0, 1 - busy / (ranks * makespan)) if makespan > 0 else 0.0


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return, per coordinate, the largest number of forwards whose backward is yet to come.

    The backward is B, or W where it is split.
    """
    change = {Op.F: int(schedule.has_backward), Op.B: -1, Op.W: -1}
    return tuple(
        max(accumulate((change.get(action.op, 0) for action in program), initial=0))
        for program in schedule.programs
    )


def _expected(schedule: Schedule) -> set[Action]:
    """Return all actions that the programs must contain exactly once."""
    split = {action[1:] for action in schedule.actions if action.op in (Op.I, Op.W)}
    expected: set[Action] = set()
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            backward = (Op.I, Op.W) if (stage, microbatch) in split else (Op.B,)
            for op in (Op.F, *backward) if schedule.has_backward else (Op.F,):
                expected.add(compute := Action(op, stage, microbatch))
                if schedule.has_communication and (send := _send_of(compute, schedule)):
                    expected |= {send, send.other_end}
    return expected


def _run(schedule: Schedule) -> Iterator[tuple[int, Action, tuple[Action, ...]]]:
    waiting = [deque(program) for program in schedule.programs]
    needed_by = cache(partial(needs, schedule=schedule))
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for coord, program in enumerate(waiting):
            while program and not (action := program[0]).is_receive:
                if not done.issuperset(needed := needed_by(action)):
                    break
                if action.is_send:
                    receive = action.other_end
                    peer = waiting[schedule.pp_coord_of_stage[receive.stage]]
                    if not peer or peer[0] != receive:
                        break
                    done.add(peer.popleft())
                done.add(program.popleft())
                moved = True
                yield coord, action, needed
    if any(waiting):
        _explain(schedule, waiting)


def _explain(schedule: Schedule, waiting: list[deque[Action]]) -> NoReturn:
    """Raise ScheduleError with the reason why no rank can continue its program."""
    heads = {coord: rest[0] for coord, rest in enumerate(waiting) if rest}
    for coord, head in heads.items():
        for need in needs(head, schedule):
            if need in waiting[coord]:
                _refuse(schedule, f"{head} comes before {need}, which it needs", head)
    stuck = ", ".join(map(str, heads.values()))
    _refuse(schedule, f"deadlock: no rank can continue from {stuck}", *heads.values())


def _refuse(schedule: Schedule, problem: str, *marked: Action) -> NoReturn:
    raise ScheduleError(f"schedule {schedule.name!r}: {problem}\n{schedule.show(*marked)}")
