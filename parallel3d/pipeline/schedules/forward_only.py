"""Forward only, for evaluation: on one or several stages per rank, placed as `interleaved` does."""

from parallel3d.pipeline.schedule import Action, Op, Schedule
from parallel3d.pipeline.schedules import interleaved


def schedule(pp_size: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """The computes of each rank: the forwards of the interleaved schedule, in its order."""
    forwards = interleaved.order(pp_size, num_microbatches, stages_per_rank)
    programs = tuple(
        tuple(Action(Op.F, chunk * pp_size + rank, i) for chunk, i in forwards)
        for rank in range(pp_size)
    )
    placement = tuple(range(pp_size)) * stages_per_rank
    return Schedule("forward_only", num_microbatches, placement, programs)


def invalid(pp_size: int, num_microbatches: int, stages_per_rank: int) -> str | None:
    """Why it cannot be used: every number of ranks, microbatches and stages per rank will do."""
    return None


def bubble(pp_size: int, num_microbatches: int, stages_per_rank: int) -> float:
    """The idle fraction, as with backwards: (p-1)/(m+p-1) for one stage per rank."""
    return interleaved.bubble(pp_size, num_microbatches, stages_per_rank)


def peak_in_flight(pp_size: int, num_microbatches: int, stages_per_rank: int) -> tuple[int, ...]:
    """Nothing is held for a backward."""
    return (0,) * pp_size
