"""1F1B: after a warm-up, one forward and one backward in turn (PipeDream-Flush, arXiv:2006.09503).

As fast as GPipe, but a rank holds the activations of at most one microbatch for itself and each
rank after it.
"""

from collections.abc import Sequence
from itertools import chain

from parallel3d.schedule.schedule import Action, Op, Schedule

# Valid where GPipe is, with the same bubble (arXiv:2104.04473, section 2.2.1).
from parallel3d.schedule.schedules.gpipe import bubble as bubble
from parallel3d.schedule.schedules.gpipe import invalid as invalid


def schedule(pp_size: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """Return each rank's computes; the warm-up is one forward per rank after this one."""
    programs = []
    for rank in range(pp_size):
        forwards = [Action(Op.F, rank, i) for i in range(num_microbatches)]
        backwards = [Action(Op.B, rank, i) for i in range(num_microbatches)]
        programs.append(in_turn(forwards, backwards, warmup=pp_size - 1 - rank))
    return Schedule("one_f_one_b", num_microbatches, tuple(range(pp_size)), tuple(programs))


def in_turn(
    forwards: Sequence[Action], backwards: Sequence[Action], warmup: int
) -> tuple[Action, ...]:
    """Return `warmup` forwards, then forwards and backwards in turn, then the other backwards."""
    warmup = min(warmup, len(forwards))
    pairs = zip(forwards[warmup:], backwards, strict=False)
    steady = chain.from_iterable(pairs)
    return (*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :])


def peak_in_flight(pp_size: int, num_microbatches: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return, per rank, the most microbatches with live activations: one per rank from it on."""
    return tuple(min(num_microbatches, pp_size - rank) for rank in range(pp_size))
