"""Simulation of a schedule: when each action runs, given the seconds that each takes."""

from collections import defaultdict
from collections.abc import Iterable

from parallel3d.schedule.action import Action, Cost, Span, Spans
from parallel3d.schedule.sharding import SHARDING

Order = Iterable[tuple[int, Action, tuple[Action, ...]]]  # coordinate, action, what it needs


def times_of(order: Order, pp_coord_of_stage: tuple[int, ...], pp_size: int, cost: Cost) -> Spans:
    """The spans of actions in an order in which they can run; action `a` takes `cost(a)` seconds.

    A compute starts when its rank is free and what it needs is there. Transfers do not hold up
    computes: one starts when both sides have come to it and their channel is free, and takes the
    cost of its SEND. The Span of a SEND is the transfer; that of a RECV begins where it is posted.
    GATHER and REDUCE take turns among a coordinate's data-parallel ranks, beside the computes.
    """
    free = [0.0] * pp_size
    channel_free: dict[tuple[int, int], float] = defaultdict(float)
    sharding_free = [0.0] * pp_size
    over: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in range(pp_size)]
    for coord, action, needed in order:
        start = free[coord]
        if action.is_send:
            receive = action.other_end
            peer = pp_coord_of_stage[receive.stage]
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

    1 - busy / (ranks x makespan), counting forwards and backwards only: what is once a step
    (reductions, the optimizer) is no part of it. arXiv:2104.04473, section 2.2, takes it over the
    busy time instead: b / (1 - b).
    """
    computes = [span for rank in spans for span in rank if span.action.is_compute]
    busy = sum(span.end - span.start for span in computes)
    makespan = max(span.end for span in computes) - min(span.start for span in computes)
    return idle_fraction(busy, len(spans), makespan)


def idle_fraction(busy: float, ranks: int, makespan: float) -> float:
    """The bubble of ranks that compute for `busy` seconds in all while `makespan` seconds pass."""
    return max(0.0, 1 - busy / (ranks * makespan)) if makespan > 0 else 0.0
