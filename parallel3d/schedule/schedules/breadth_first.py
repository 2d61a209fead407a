"""Breadth-first: all microbatches through one stage before the next (arXiv:2211.05953).

Stage c*p + r is chunk c of rank r, as in `interleaved`, with the same bubble. Weights gathered for
a pass serve all microbatches, and a stage's gradients are complete as early as possible.
"""

from parallel3d.schedule.schedule import Action, Op, Schedule

# One round of all microbatches waits as long as the rounds of `interleaved`.
from parallel3d.schedule.schedules.interleaved import bubble as bubble


def schedule(pp_size: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """Return each rank's computes: F of all its chunks, then B, each for all microbatches."""
    chunks = range(stages_per_rank)
    microbatches = range(num_microbatches)
    passes = [(Op.F, chunk) for chunk in chunks] + [(Op.B, chunk) for chunk in reversed(chunks)]
    programs = []
    for rank in range(pp_size):
        program: list[Action] = []
        for op, chunk in passes:
            program += [Action(op, chunk * pp_size + rank, i) for i in microbatches]
        programs.append(tuple(program))
    placement = tuple(range(pp_size)) * stages_per_rank
    return Schedule("breadth_first", num_microbatches, placement, tuple(programs))


def invalid(pp_size: int, num_microbatches: int, stages_per_rank: int) -> str | None:
    """Return why the sizes are invalid, or None: each rank needs several stages."""
    if stages_per_rank == 1:
        return "stages_per_rank=1; use stages_per_rank = 2 or more, or the schedule 'gpipe'"
    return None


def peak_in_flight(pp_size: int, num_microbatches: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return, per rank, the most (stage, microbatch) pairs with live activations: all of them."""
    return (stages_per_rank * num_microbatches,) * pp_size
