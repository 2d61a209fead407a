"""The time at which each coordinate ends its step, as `simulate` has it, without all spans.

All computes but the first and the last repeat earlier ones, so a long list is timed by two short
lists of the same schedule, and extended from there in equal steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from parallel3d.schedule.schedule import Action, Op, sequence
from parallel3d.schedule.schedules import load

SHORT = 32  # microbatches after which a pipeline of any depth has settled, but see `counts`


@dataclass(eq=False)
class Steps:
    """A schedule's sequence as numbers.

    `priced`: one action of each op and stage; a place in it stands for its cost. `rows`: of each
    compute (place of its cost, coordinate, -1, place of the receive that it waits for or 0, whether
    it follows another of the coordinate's last backwards); of each send (place of its cost,
    coordinate, peer, channel, place of its receive).
    """

    pp: int
    priced: tuple[Action, ...]
    rows: list[tuple[int, int, int, int, int]]
    num_receives: int
    num_channels: int


class CoordinateEnd(NamedTuple):
    """The time of a coordinate's last compute, and how long its `last_passes` backwards waited."""

    seconds: float
    waited: float


def last_passes(pp: int, num_microbatches: int, stages_per_rank: int) -> int:
    """Number of a stage's first, or last, microbatches that can hide work done once a step.

    An interleaved schedule takes them pp at a time (arXiv:2104.04473, section 2.2).
    """
    return min(pp, num_microbatches) if stages_per_rank > 1 else 1


def ends(
    name: str, pp: int, num_microbatches: int, stages_per_rank: int,
    cost: Callable[[Action], float], sends: bool = True,
) -> list[CoordinateEnd]:  # fmt: skip
    """The end of each coordinate's step; `cost` is the same for all microbatches."""
    fewer, more = counts(pp, num_microbatches)
    last = _ends(steps_of(name, pp, more, stages_per_rank), cost, sends)
    if more == num_microbatches:
        return last
    first = _ends(steps_of(name, pp, fewer, stages_per_rank), cost, sends)
    times = (num_microbatches - more) / (more - fewer)
    return [
        CoordinateEnd(b + times * (b - a), w) for (a, _), (b, w) in zip(first, last, strict=True)
    ]


def counts(pp: int, num_microbatches: int) -> tuple[int, int]:
    """Two numbers of microbatches, a round apart, from which the time of all is extrapolated.

    A round is a multiple of the ranks; few microbatches are simulated all (both numbers).
    """
    round_ = pp * -(-SHORT // pp)
    fewer = round_ + num_microbatches % round_
    more = fewer + round_
    return (fewer, more) if more < num_microbatches else (num_microbatches, num_microbatches)


@lru_cache(maxsize=256)
def steps_of(name: str, pp: int, num_microbatches: int, stages_per_rank: int) -> Steps:
    """The named schedule's sequence, from which `add_communication` cuts each rank's program."""
    schedule = load(name).schedule(pp, num_microbatches, stages_per_rank)
    homes = schedule.pp_coord_of_stage
    window = stages_per_rank * last_passes(pp, num_microbatches, stages_per_rank)
    firsts = {[a for a in program if a.op != Op.F][-window:][0] for program in schedule.programs}
    inside = [0] * pp
    costs: dict[tuple[Op, int], int] = {}
    receives: dict[tuple[Op, int, int], int] = {}
    channels: dict[tuple[int, int], int] = {}
    rows = []
    for action in sequence(schedule):
        op, stage, microbatch = action
        coord = homes[stage]
        cost = costs.setdefault((op, stage), len(costs))
        if action.is_send:
            receive = action.other_end
            peer = homes[receive.stage]
            channel = channels.setdefault((min(coord, peer), max(coord, peer)), len(channels))
            receives[receive] = len(receives) + 1
            rows.append((cost, coord, peer, channel, receives[receive]))
        else:
            arrives = Op.RECV_F if op == Op.F else Op.RECV_B, stage, microbatch
            rows.append((cost, coord, -1, receives.get(arrives, 0), inside[coord]))
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
