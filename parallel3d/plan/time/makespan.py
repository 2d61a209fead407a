"""The time at which each coordinate ends its step, as in `simulate`, without computing all spans.

A schedule's middle part repeats. So a long schedule is timed by simulating two short ones and
extrapolating their difference.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from parallel3d.plan.setting import ActionOrder
from parallel3d.schedule.schedule import Action, Op, sequence
from parallel3d.schedule.schedules import load

SHORT = 32  # microbatches after which a pipeline has settled, rounded up by `counts`


@dataclass(eq=False)
class Steps:
    """A schedule's sequence of actions as numbers.

    - `priced`: one action of each op and stage. Its index is the index of the cost.
    - `rows`: one row per compute and send.
      Compute: (cost, coordinate, -1, the receive that it waits for or 0, 1 if it follows another of
      the coordinate's last backwards).
      Send: (cost, coordinate, peer, channel, its receive).
    """

    pp: int
    priced: tuple[Action, ...]
    rows: list[tuple[int, int, int, int, int]]
    num_receives: int
    num_channels: int


class CoordinateEnd(NamedTuple):
    """The end of a coordinate's last compute, and how long its `last_passes` backwards waited."""

    seconds: float
    waited: float


def last_passes(order: ActionOrder) -> int:
    """Return how many of a stage's first, or last, microbatches can hide work done once per step.

    Interleaved schedules run pp microbatches at a time (arXiv:2104.04473, section 2.2).
    """
    return min(order.pp, order.num_microbatches) if order.stages_per_rank > 1 else 1


def ends(
    order: ActionOrder, cost: Callable[[Action], float], sends: bool = True
) -> list[CoordinateEnd]:
    """Return the end of each coordinate's step; `cost` is the same for all microbatches."""
    fewer, more = counts(order.pp, order.num_microbatches)
    last = _ends(steps_of(order._replace(num_microbatches=more)), cost, sends)
    if more == order.num_microbatches:
        return last
    first = _ends(steps_of(order._replace(num_microbatches=fewer)), cost, sends)
    times = (order.num_microbatches - more) / (more - fewer)
    return [
        CoordinateEnd(b + times * (b - a), w) for (a, _), (b, w) in zip(first, last, strict=True)
    ]


def counts(pp: int, num_microbatches: int) -> tuple[int, int]:
    """Return two numbers of microbatches, from whose times the time of all is extrapolated.

    They differ by a multiple of the ranks. If there are few microbatches, both are their number:
    all are simulated.
    """
    round_ = pp * -(-SHORT // pp)
    fewer = round_ + num_microbatches % round_
    more = fewer + round_
    return (fewer, more) if more < num_microbatches else (num_microbatches, num_microbatches)


@lru_cache(maxsize=256)
def steps_of(order: ActionOrder) -> Steps:
    """Return a schedule's sequence, which `add_communication` splits by rank."""
    name, *sizes = order
    schedule = load(name).schedule(*sizes)
    pp = order.pp
    homes = schedule.pp_coord_of_stage
    window = order.stages_per_rank * last_passes(order)
    firsts = {[a for a in program if a.op != Op.F][-window:][0] for program in schedule.programs}
    inside = [0] * pp
    costs: dict[tuple[Op, int], int] = {}
    channels: dict[tuple[int, int], int] = {}
    receives: dict[Action, int] = {}
    rows: list[tuple[int, int, int, int, int]] = []
    for action in sequence(schedule):
        op, stage, microbatch = action
        coord = homes[stage]
        cost = costs.setdefault((op, stage), len(costs))
        if action.is_send:
            receive = action.other_end
            receives[receive] = number = len(receives) + 1
            peer = homes[receive.stage]
            channel = channels.setdefault((min(coord, peer), max(coord, peer)), len(channels))
            rows.append((cost, coord, peer, channel, number))
        else:
            needed = Action(Op.RECV_F if op == Op.F else Op.RECV_B, stage, microbatch)
            rows.append((cost, coord, -1, receives.get(needed, 0), inside[coord]))
            inside[coord] |= action in firsts
    priced = tuple(Action(op, stage, 0) for op, stage in costs)
    return Steps(pp, priced, rows, len(receives), len(channels))


def _ends(steps: Steps, cost: Callable[[Action], float], sends: bool) -> list[CoordinateEnd]:
    seconds = [cost(action) if sends or action.is_compute else 0.0 for action in steps.priced]
    free = [0.0] * steps.pp
    waited = [0.0] * steps.pp
    over = [0.0] * (steps.num_receives + 1)
    channel_free = [0.0] * steps.num_channels
    for place, coord, peer, at, own in steps.rows:
        start = free[coord]
        if peer < 0:
            if (needed := over[at]) > start:
                if own:
                    waited[coord] += needed - start
                start = needed
            free[coord] = start + seconds[place]
        else:
            if (other := free[peer]) > start:
                start = other
            if (earlier := channel_free[at]) > start:
                start = earlier
            over[own] = channel_free[at] = start + seconds[place]
    return [*map(CoordinateEnd, free, waited)]
