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
