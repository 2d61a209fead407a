"""Lifetimes of a coordinate's gathered weights (ZeRO-3) and of its unreduced gradients.

They follow from the schedule's actions with GATHERs and RELEASEs (schedule/sharding.py).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from parallel3d.plan.layers.placement import (
    MicrobatchCounts,
    programs_of,
    shortened,
    stages_on,
)
from parallel3d.plan.setting import ActionOrder
from parallel3d.schedule.action import Op
from parallel3d.schedule.sharding import Weights, with_sharding

Held = tuple[int, ...]  # some of a coordinate's stages, as indices into its list of stages


class Arrival(NamedTuple):
    """A moment at which a compute waits for the gathered weights of its stage.

    - `place`: the stage, as an index into the coordinate's stages.
    - `forward`: True if a forward waits.
    - `flight` [stages]: microbatches in flight at that moment.
    - `held`: all stages whose weights are gathered then, including `place`.
    """

    place: int
    forward: bool
    flight: MicrobatchCounts
    held: Held


@dataclass(frozen=True)
class Windows:
    """The stage weights that one pipeline coordinate gathers in a step, and when.

    - `times` [stages]: gathers of each stage in a step.
    - `forward`, `backward` [stages]: the sets of stages whose weights are gathered during some
      forward, or backward, of that stage.
    - `arrivals`: all waits for weights, in order.
    """

    times: tuple[int, ...]
    forward: tuple[frozenset[Held], ...]
    backward: tuple[frozenset[Held], ...]
    arrivals: tuple[Arrival, ...]


class Gradients(NamedTuple):
    """The lifetime of one stage's gradients, from its first backward to the final reduction.

    - `arrival`, `first`, `last` [stages]: microbatches in flight before the stage's first forward,
      before its first backward, and after its last backward.
    - `beside`, `left`: the other stages whose unreduced gradients exist at `first` and at `last`.
    - `forward`: the sets of stages whose unreduced gradients exist during some forward of this
      stage.
    """

    arrival: MicrobatchCounts
    first: MicrobatchCounts
    beside: Held
    last: MicrobatchCounts
    left: Held
    forward: frozenset[Held]


_ALONE = frozenset({(0,)})
_ONE_STAGE = Windows((1,), (_ALONE,), (_ALONE,), (Arrival(0, True, (0,), (0,)),))


def windows_of(order: ActionOrder, weights: Weights, coord: int) -> Windows:
    """Return the weight gathers of one pipeline coordinate in a step."""
    if order.stages_per_rank == 1:
        return _ONE_STAGE
    if weights == "per_step":
        return _per_step(gradients(order, coord))
    return _windows(shortened(order), weights, coord)


@lru_cache(maxsize=65536)
def _windows(order: ActionOrder, weights: Weights, coord: int) -> Windows:
    program = programs_of(order)[coord]
    home = stages_on(order.schedule, order.pp, order.stages_per_rank)[coord]
    times = [0] * len(home)
    counts = [0] * len(home)
    passes: dict[bool, list[set[Held]]] = {there: [set() for _ in home] for there in (True, False)}
    held: set[int] = set()
    coming: set[int] = set()
    arrivals = []
    for op, stage, _ in with_sharding(program, weights, False):
        place = home.index(stage)
        if op == Op.GATHER:
            times[place] += 1
            held.add(place)
            coming.add(place)
        elif op == Op.RELEASE:
            held.discard(place)
        elif op != Op.W:
            now = tuple(sorted(held))
            if place in coming:
                coming.discard(place)
                arrivals.append(Arrival(place, op == Op.F, tuple(counts), now))
            passes[op == Op.F][place].add(now)
        if op in (Op.F, Op.B, Op.W):
            counts[place] += 1 if op == Op.F else -1
    forward, backward = (tuple(map(frozenset, passes[there])) for there in (True, False))
    return Windows(tuple(times), forward, backward, tuple(arrivals))


def _per_step(own: tuple[Gradients, ...]) -> Windows:
    """Return the weight gathers of "per_step": from a stage's first forward to the step's end."""
    places = tuple(range(len(own)))
    every = (frozenset({places}),) * len(own)
    arrivals = tuple(Arrival(p, True, own[p].arrival, places[: p + 2]) for p in places)
    return Windows((1,) * len(own), every, every, arrivals)


@lru_cache(maxsize=65536)
def gradients(order: ActionOrder, coord: int) -> tuple[Gradients, ...]:
    """Return the lifetimes of the gradients of one pipeline coordinate's stages."""
    program = programs_of(shortened(order))[coord]
    home = stages_on(order.schedule, order.pp, order.stages_per_rank)[coord]
    place_of = {stage: place for place, stage in enumerate(home)}
    last = {action.stage: i for i, action in enumerate(program) if action.op in (Op.B, Op.W)}
    counts = [0] * len(home)
    unreduced = set[int]()
    forward: list[set[Held]] = [set() for _ in home]
    arrival: dict[int, MicrobatchCounts] = {}
    begun: dict[int, tuple[MicrobatchCounts, Held]] = {}
    ended: dict[int, tuple[MicrobatchCounts, Held]] = {}
    for i, (op, stage, _) in enumerate(program):
        place = place_of[stage]
        if op == Op.F:
            arrival.setdefault(place, tuple(counts))
            forward[place].add(tuple(sorted(unreduced)))
        elif place not in unreduced:
            begun[place] = tuple(counts), tuple(sorted(unreduced))
            unreduced.add(place)
        if op != Op.I:
            counts[place] += 1 if op == Op.F else -1
        if i == last[stage]:
            unreduced.discard(place)
            ended[place] = tuple(counts), tuple(sorted(unreduced))
    places = range(len(home))
    return tuple(Gradients(arrival[p], *begun[p], *ended[p], frozenset(forward[p])) for p in places)
