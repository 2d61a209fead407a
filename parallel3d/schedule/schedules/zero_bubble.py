"""ZB-H1: 1F1B with split backwards; weight gradients fill idle time (arXiv:2401.10241).

The previous stage waits only for the input gradient (I). Rank r delays r weight gradients (W) to
its idle end. It holds as much as the first rank of 1F1B, and the bubble is a third.
"""

from parallel3d.schedule.schedule import Action, Op, Schedule

# Valid where GPipe is.
from parallel3d.schedule.schedules.gpipe import invalid as invalid
from parallel3d.schedule.schedules.one_f_one_b import in_turn


def schedule(pp_size: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """Return each rank's computes: 1F1B's order, with a W behind each I from the r-th on."""
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
    """Return the idle fraction: each rank waits p-1 times for the longer of F and I.

    This is (p-1)/(3m+p-1) if a backward takes two forwards (the paper's (p-1)(F + I - W)). With
    fewer than p microbatches there are fewer W to fill the idle time.
    """
    half = backward / 2
    filled = (min(pp_size, num_microbatches) - 1) * min(1.0, half)
    waiting = (pp_size - 1) * (1.0 + half) - filled
    return waiting / (num_microbatches * (1.0 + backward) + waiting)


def peak_in_flight(pp_size: int, num_microbatches: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return, per rank, the most microbatches held from F to W: p."""
    return (min(pp_size, num_microbatches),) * pp_size
