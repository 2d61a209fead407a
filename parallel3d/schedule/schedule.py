"""Pipeline schedules as data: one list per rank that is drawn, checked, timed and run.

`needs` alone knows which action waits for which; a schedule file writes the order of computes.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import accumulate, chain, pairwise
from typing import NoReturn

from parallel3d.base.errors import ScheduleError
from parallel3d.schedule.action import Action, Cost, Op, Span, Spans, unit_cost
from parallel3d.schedule.sharding import SHARDING, Weights, gathers, problems, with_sharding

__all__ = [
    "Action", "Op", "Schedule", "Span", "Spans", "add_communication", "add_sharding", "bubble",
    "idle_fraction", "needs", "peak_in_flight", "sequence", "simulate", "unit_cost", "validate",
]  # fmt: skip


@dataclass(frozen=True)
class Schedule:
    """Which stage lives where, and what each pipeline coordinate does, in order."""

    name: str
    num_microbatches: int
    pp_coord_of_stage: tuple[int, ...]
    programs: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return len(self.pp_coord_of_stage)

    @property
    def pp_size(self) -> int:
        """Ranks of the pipeline, one program each."""
        return len(self.programs)

    @cached_property
    def actions(self) -> frozenset[Action]:
        """Every action of every program."""
        return frozenset(chain.from_iterable(self.programs))

    @cached_property
    def has_communication(self) -> bool:
        """Whether sends and receives are part of the programs."""
        return any(action.is_send or action.is_receive for action in self.actions)

    @cached_property
    def has_backward(self) -> bool:
        """Whether it trains; a forward-only schedule evaluates."""
        return any(action.is_compute and action.op != Op.F for action in self.actions)

    @cached_property
    def gather_of(self) -> dict[Action, Action]:
        """The GATHER that gives each compute its weights, where programs gather them."""
        return gathers(self.programs)

    @cached_property
    def order(self) -> tuple[tuple[int, Action, tuple[Action, ...]], ...]:
        """All (coordinate, action, what it needs) in an order in which blocking ranks can run.

        A SEND stands for its RECV. Raises ScheduleError where the ranks get stuck.
        """
        return tuple(_run(self))

    @cached_property
    def crossings(self) -> frozenset[int]:
        """The stages whose successor lives on another rank."""
        pairs = enumerate(pairwise(self.pp_coord_of_stage))
        return frozenset(stage for stage, (here, there) in pairs if here != there)

    def show(self, *marked: Action) -> str:
        """The programs, one line per rank, with the `marked` actions standing out as >>2F0<<."""
        texts = ([f">>{a}<<" if a in marked else str(a) for a in p] for p in self.programs)
        return "\n".join(f"  rank {coord} | {' '.join(text)}" for coord, text in enumerate(texts))


def needs(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """The actions that must be over before this one starts: the one rule of every schedule."""
    weights = schedule.gather_of.get(action)
    return (*_data(action, schedule), weights) if weights else _data(action, schedule)


def _data(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """The actions that give what this one works on, but for the weights."""
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
            return (own, _input_gradient(stage + 1, microbatch, schedule))
        case Op.W:
            return (Action(Op.I, stage, microbatch),)
        case Op.SEND_F:
            return (Action(Op.F, stage, microbatch),)
        case Op.SEND_B:
            return (_input_gradient(stage, microbatch, schedule),)
        case Op.RECV_F | Op.RECV_B:
            return (action.other_end,)
        case Op.REDUCE:
            split = Action(Op.W, stage, microbatch)
            return (split if split in schedule.actions else Action(Op.B, stage, microbatch),)
        case _:
            return ()


def _input_gradient(stage: int, microbatch: int, schedule: Schedule) -> Action:
    """The action that gives the gradient of a stage's input: I where split, else B."""
    split = Action(Op.I, stage, microbatch)
    return split if split in schedule.actions else Action(Op.B, stage, microbatch)


def _send_of(compute: Action, schedule: Schedule) -> Action | None:
    """The SEND that takes a compute's result to another coordinate; None if it stays or ends."""
    op, stage, microbatch = compute
    if op == Op.F and stage in schedule.crossings:
        return Action(Op.SEND_F, stage, microbatch)
    if op in (Op.B, Op.I) and stage - 1 in schedule.crossings:
        return Action(Op.SEND_B, stage, microbatch)
    return None


def validate(schedule: Schedule) -> None:
    """Raise ScheduleError unless the schedule can run, with the programs and the culprit printed.

    Each compute stands once per stage and microbatch, on the stage's rank, after what it needs;
    each send has its receive, and *blocking* ones over one channel a pair of ranks (NCCL's) end.
    """
    stages, microbatches = range(schedule.num_stages), range(schedule.num_microbatches)
    for coord, program in enumerate(schedule.programs):
        for action in program:
            if action.stage not in stages or action.microbatch not in microbatches:
                _refuse(schedule, f"{action}: there is no such stage or microbatch", action)
            if (home := schedule.pp_coord_of_stage[action.stage]) != coord:
                _refuse(schedule, f"{action} is on rank {coord}; its stage is on {home}", action)
        for problem, action in problems(program):
            _refuse(schedule, problem, action)
    expected = _expected(schedule)
    counts = Counter(chain.from_iterable(schedule.programs))
    for action, count in counts.items():
        if action.op in SHARDING:
            continue
        if action not in expected:
            _refuse(schedule, f"{action} has no purpose: nothing uses what it gives", action)
        if count > 1:
            _refuse(schedule, f"{action} stands {count} times", action)
    if missing := sorted(expected - counts.keys()):
        _refuse(schedule, f"missing: {', '.join(map(str, missing))}")
    _ = schedule.order  # exists only if nothing blocks for ever


def add_communication(schedule: Schedule) -> Schedule:
    """A schedule's computes with SEND and RECV among them, free of deadlock by construction.

    All are cuts of `sequence`; a RECV is posted one compute ahead, to overlap with it.
    """
    programs: list[list[Action]] = [[] for _ in schedule.programs]
    for action in sequence(schedule):
        for end in (action, action.other_end) if action.is_send else (action,):
            programs[schedule.pp_coord_of_stage[end.stage]].append(end)
    return replace(schedule, programs=tuple(map(tuple, programs)))


def add_sharding(schedule: Schedule, weights: Weights, reduces_once: bool) -> Schedule:
    """A schedule's programs with GATHER, RELEASE and REDUCE (`with_sharding`), validated."""
    programs = tuple(with_sharding(p, weights, reduces_once) for p in schedule.programs)
    whole = replace(schedule, programs=programs)
    validate(whole)
    return whole


def sequence(schedule: Schedule) -> Iterator[Action]:
    """All computes in the order in which they end in `simulate`, each with its SEND behind it."""

    def turn(span: Span) -> tuple[float, int, int]:
        # Of computes that end together the sender's comes first: so the RECV stands before the
        # peer's, not behind it.
        is_forward, stage = span.action.op == Op.F, span.action.stage
        return (span.end, 0, stage) if is_forward else (span.end, 1, -stage)

    assert not schedule.has_communication
    for action, _, _ in sorted(chain.from_iterable(simulate(schedule, unit_cost)), key=turn):
        send = _send_of(action, schedule)
        yield from (action, send) if send else (action,)


def simulate(schedule: Schedule, cost: Cost) -> Spans:
    """The time at which each action runs, per coordinate, if action `a` takes `cost(a)` seconds.

    Computes wait for their rank and what they need. A transfer starts when both sides have come to
    it and their channel is free, holds up no compute, and takes the cost of its SEND; the Span of
    its RECV begins where it is posted. GATHER and REDUCE take turns beside the computes.
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
    """The idle fraction of the ranks' time, from the first compute to the end of the last.

    What is once a step does not count. arXiv:2104.04473, section 2.2, gives b / (1 - b).
    """
    computes = [span for rank in spans for span in rank if span.action.is_compute]
    busy = sum(span.end - span.start for span in computes)
    makespan = max(span.end for span in computes) - min(span.start for span in computes)
    return idle_fraction(busy, len(spans), makespan)


def idle_fraction(busy: float, ranks: int, makespan: float) -> float:
    """The bubble of ranks that compute for `busy` seconds in all while `makespan` seconds pass."""
    return max(0.0, 1 - busy / (ranks * makespan)) if makespan > 0 else 0.0


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per coordinate, the most forwards whose backward (B, or W where split) is still to come."""
    change = {Op.F: int(schedule.has_backward), Op.B: -1, Op.W: -1}
    return tuple(
        max(accumulate((change.get(action.op, 0) for action in program), initial=0))
        for program in schedule.programs
    )


def _expected(schedule: Schedule) -> set[Action]:
    """What the programs must hold, each once: all computes, and all sends and receives if any."""
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
    """Says why no rank can go on with the rest of its program."""
    heads = {coord: rest[0] for coord, rest in enumerate(waiting) if rest}
    for coord, head in heads.items():
        for need in needs(head, schedule):
            if need in waiting[coord]:
                _refuse(schedule, f"{head} comes before {need}, which it needs", head)
    peers = {
        coord: schedule.pp_coord_of_stage[head.other_end.stage]
        for coord, head in heads.items()
        if head.is_send or head.is_receive
    }
    for coord, peer in peers.items():
        if peers.get(peer) == coord:
            both = f"rank {coord} is at {heads[coord]} while rank {peer} is at {heads[peer]}"
            _refuse(schedule, f"one channel, two orders: {both}", heads[coord], heads[peer])
    stuck = ", ".join(map(str, heads.values()))
    _refuse(schedule, f"deadlock: no rank can go on from {stuck}", *heads.values())


def _refuse(schedule: Schedule, problem: str, *marked: Action) -> NoReturn:
    raise ScheduleError(f"schedule {schedule.name!r}: {problem}\n{schedule.show(*marked)}")
