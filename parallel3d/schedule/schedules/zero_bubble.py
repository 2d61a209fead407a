"""ZB-H1: 1F1B with backwards split, their weight half made in idle time (arXiv:2401.10241).

The stage before waits for the input's gradient (I) alone. Rank r keeps r weight gradients (W) back
for its idle end; it holds what the first rank of 1F1B does, and the bubble is a third.
"""

from parallel3d.schedule.schedule import Action, Op, Schedule

# Valid wherever GPipe is.
from parallel3d.schedule.schedules.gpipe import invalid
from parallel3d.schedule.schedules.one_f_one_b import in_turn

__all__ = ["bubble", "invalid", "peak_in_flight", "schedule"]


def schedule(pp_size: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """The computes of each rank: 1F1B's order, and from the r-th I on a W behind each."""
    microbatches = range(num_microbatches)
    programs = []
    for rank in range(pp_size):
        forwards, inputs, weights = (
            [Action(op, rank, i) for i in microbatches] for op in (Op.F, Op.I, Op.W)
        )
        program: list[Action] = []
        for action in in_turn(forwards, inputs, warmup=pp_size - 1 - rank):
            program.append(action)
            if action.op is Op.I and action.microbatch >= rank:
                program.append(weights[action.microbatch - rank])
        program += weights[max(0, num_microbatches - rank) :]
        programs.append(tuple(program))
    return Schedule("zero_bubble", num_microbatches, tuple(range(pp_size)), tuple(programs))


def bubble(
    pp_size: int, num_microbatches: int, stages_per_rank: int, backward: float = 2.0
) -> float:
    """The idle fraction: each rank waits p-1 times for the longer of F and I (half a backward).

    (p-1)/(3m+p-1) where a backward takes two forwards (the paper's (p-1)(F + I - W)); with fewer
    than p microbatches there is less to fill the idle time with.
    """
    half = backward / 2
    filled = (min(pp_size, num_microbatches) - 1) * min(1.0, half)
    waiting = (pp_size - 1) * (1.0 + half) - filled
    return waiting / (num_microbatches * (1.0 + backward) + waiting)


def peak_in_flight(pp_size: int, num_microbatches: int, stages_per_rank: int) -> tuple[int, ...]:
    """Microbatches whose activations a rank holds at most, from F to W: p on each rank."""
    return (min(pp_size, num_microbatches),) * pp_size
