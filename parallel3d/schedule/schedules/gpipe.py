"""GPipe: all forwards, then all backwards (arXiv:1811.06965, figure 2c).

Backwards run in the order of the forwards, so that gradients add up in the same order, and to the
same bits, as in every other schedule.
"""

from parallel3d.schedule.schedule import Action, Op, Schedule


def schedule(pp_size: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """Return each rank's computes: F of every microbatch, then B of every microbatch."""
    programs = []
    for rank in range(pp_size):
        forwards = [Action(Op.F, rank, i) for i in range(num_microbatches)]
        backwards = [Action(Op.B, rank, i) for i in range(num_microbatches)]
        programs.append((*forwards, *backwards))
    return Schedule("gpipe", num_microbatches, tuple(range(pp_size)), tuple(programs))


def invalid(pp_size: int, num_microbatches: int, stages_per_rank: int) -> str | None:
    """Return why the sizes are invalid, or None: each rank needs one stage."""
    if stages_per_rank != 1:
        remedy = "use stages_per_rank = 1, or the schedule 'interleaved'"
        return f"stages_per_rank={stages_per_rank}; {remedy}"
    return None


def bubble(
    pp_size: int, num_microbatches: int, stages_per_rank: int, backward: float = 2.0
) -> float:
    """Return the idle fraction, (p-1)/(m+p-1): GPipe, section 2.3."""
    return (pp_size - 1) / (num_microbatches + pp_size - 1)


def peak_in_flight(pp_size: int, num_microbatches: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return, per rank, the most microbatches with live activations: all of them."""
    return (num_microbatches,) * pp_size
