"""When each pipeline coordinate is done, as `simulate` says it, without building the spans.

A pipeline of 64 ranks and 512 microbatches is 65,000 computes, of which all but the first and the
last repeat those before. So a long list is timed by two short ones of the same schedule, and goes
on from there in equal steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from parallel3d.schedule.schedule import Action, Op
from parallel3d.schedule.schedules import load

SHORT = 32  # microbatches after which a pipeline of any depth has settled, but see `counts`


@dataclass(eq=False)
class Steps:
    """A schedule's sequence in numbers.

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


class End(NamedTuple):
    """When a coordinate has done its last compute, and for how long its last backwards waited.

    Those are `last_passes` of each of its stages. A wait before the first of them does not count.
    """

    seconds: float
    waited: float


def last_passes(pp: int, num_microbatches: int, stages_per_rank: int) -> int:
    """The first or last microbatches of a stage behind which what happens once a step hides.

    An interleaved schedule takes the microbatches of each of a rank's stages pp at a time
    (arXiv:2104.04473, section 2.2), with the next stage's to hide behind.
    """
    return min(pp, num_microbatches) if stages_per_rank > 1 else 1


def ends(
    name: str,
    pp: int,
    num_microbatches: int,
    stages_per_rank: int,
    cost: Callable[[Action], float],
    sends: bool = True,
) -> list[End]:
    """When each coordinate is done; without `sends` these take no time.

    `cost` must be the same for all microbatches.
    """
    fewer, more = counts(pp, num_microbatches)
    last = _ends(steps_of(name, pp, more, stages_per_rank), cost, sends)
    if more == num_microbatches:
        return last
    first = _ends(steps_of(name, pp, fewer, stages_per_rank), cost, sends)
    times = (num_microbatches - more) / (more - fewer)
    return [End(b + times * (b - a), w) for (a, _), (b, w) in zip(first, last, strict=True)]


def counts(pp: int, num_microbatches: int) -> tuple[int, int]:
    """So few microbatches, and a round more, from which one can go on; or all, twice.

    A round is as many as there are ranks, because schedules run them in such groups; what is left
    over from whole rounds is left over in both.
    """
    round_ = pp * -(-SHORT // pp)
    fewer = round_ + num_microbatches % round_
    more = fewer + round_
    return (fewer, more) if more < num_microbatches else (num_microbatches, num_microbatches)


@lru_cache(maxsize=256)
def steps_of(name: str, pp: int, num_microbatches: int, stages_per_rank: int) -> Steps:
    """The named schedule's own sequence: what `add_communication` cuts its programs from.

    The same as by `sequence`, which a test compares, in whole numbers for speed: an action is
    (op x stages + stage) x microbatches + microbatch.
    """
    schedule = load(name).schedule(pp, num_microbatches, stages_per_rank)
    homes, size, count = schedule.pp_coord_of_stage, schedule.num_stages, num_microbatches
    programs = [
        [(_OPS[op] * size + stage) * count + i for op, stage, i in program]
        for program in schedule.programs
    ]
    turns = _turns(programs, size, count)
    if turns is None:
        _ = schedule.order  # says why no rank can go on
        raise AssertionError("a schedule has an order, or says why not")
    backward, inner = size * count, 2 * size * count
    splits = {number - inner for program in programs for number in program if number >= inner}
    costs: dict[int, int] = {}
    receives: dict[int, int] = {}  # by what is sent
    channels: dict[tuple[int, int], int] = {}
    window = stages_per_rank * last_passes(pp, num_microbatches, stages_per_rank)
    firsts = {[n for n in program if n >= backward][-window:][0] for program in programs}
    inside = [0] * pp
    rows = []
    for number in turns:
        place, microbatch = divmod(number, count)
        op, stage = divmod(place, size)
        coord = homes[stage]
        cost = costs.setdefault(place, len(costs))
        source = -1  # what comes from another rank, and to which stage this goes
        goes = stage + 1 if op == 0 else stage - 1 if op < 3 else size
        comes = stage - 1 if op == 0 else stage + 1 if op < 3 else size
        if 0 <= comes < size and homes[comes] != coord:
            source = comes * count + microbatch
            if op:
                source += inner if source in splits else backward
        rows.append((cost, coord, -1, receives[source] if source >= 0 else 0, inside[coord]))
        inside[coord] |= number in firsts
        if 0 <= goes < size and homes[goes] != coord:
            peer = homes[goes]
            channel = channels.setdefault((min(coord, peer), max(coord, peer)), len(channels))
            receives[number] = len(receives) + 1
            send = (4 + (op > 0)) * size + stage
            cost = costs.setdefault(send, len(costs))
            rows.append((cost, coord, peer, channel, receives[number]))
    ops = (*_OPS, Op.SEND_F, Op.SEND_B)
    priced = tuple(Action(ops[place // size], place % size, 0) for place in costs)
    return Steps(pp, priced, rows, len(receives), len(channels))


_OPS = {Op.F: 0, Op.B: 1, Op.I: 2, Op.W: 3}
_UNITS = (1, 2, 1, 1)  # what each takes in `unit_cost`


def _turns(programs: list[list[int]], size: int, count: int) -> list[int] | None:
    """All computes in the order in which they end, if each takes its unit cost; None if stuck."""
    backward, inner = size * count, 2 * size * count
    last = (size - 1) * count
    splits = {number - inner for program in programs for number in program if number >= inner}
    ends = [-1] * (4 * size * count)
    at, free = [0] * len(programs), [0] * len(programs)
    moved = True
    while moved:
        moved = False
        for coord, program in enumerate(programs):
            start, place = free[coord], at[coord]
            while place < len(program):
                number = program[place]
                if number < backward:
                    ready = ends[number - count] if number >= count else 0
                elif number >= inner + backward:
                    ready = ends[number - backward]
                else:
                    plain = number - (inner if number >= inner else backward)
                    ready = ends[plain]  # on this rank, so over before
                    if ready >= 0 and plain < last:
                        after = plain + count
                        other = ends[after + (inner if after in splits else backward)]
                        ready = -1 if other < 0 else max(ready, other)
                if ready < 0:
                    break
                ends[number] = start = max(start, ready) + _UNITS[number // backward]
                place += 1
            if place > at[coord]:
                at[coord], free[coord], moved = place, start, True
    if any(place < len(program) for place, program in zip(at, programs, strict=True)):
        return None

    def turn(number: int) -> tuple[int, int, int]:
        stage = number // count % size
        return (ends[number], 0, stage) if number < backward else (ends[number], 1, -stage)

    return sorted((number for program in programs for number in program), key=turn)


def _ends(steps: Steps, cost: Callable[[Action], float], sends: bool) -> list[End]:
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
    return [*map(End, free, waited)]
