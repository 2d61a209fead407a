"""Interleaved 1F1B: each rank holds several chunks of the model (arXiv:2104.04473, section 2.2.2).

Chunk c of rank r is stage c*p + r. A microbatch passes all ranks once per chunk, and the bubble
shrinks by the number of chunks, for more communication and activations.
"""

from parallel3d.schedule.schedule import Action, Op, Schedule
from parallel3d.schedule.schedules.one_f_one_b import in_turn


def schedule(pp_size: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """Return each rank's computes: 1F1B over (chunk, microbatch), with Megatron's warm-up."""
    forwards = order(pp_size, num_microbatches, stages_per_rank)
    backwards = [(stages_per_rank - 1 - chunk, i) for chunk, i in forwards]
    programs = []
    for rank in range(pp_size):
        program = in_turn(
            [Action(Op.F, chunk * pp_size + rank, i) for chunk, i in forwards],
            [Action(Op.B, chunk * pp_size + rank, i) for chunk, i in backwards],
            warmup=_warmup(rank, pp_size, num_microbatches, stages_per_rank),
        )
        programs.append(program)
    placement = tuple(range(pp_size)) * stages_per_rank
    return Schedule("interleaved", num_microbatches, placement, tuple(programs))


def rounds(pp_size: int, num_microbatches: int) -> tuple[range, ...]:
    """Return the microbatches in groups that go through one chunk after another.

    A group of p or more returns to the first rank just when that is free. Megatron needs groups of
    exactly p; any number m >= p works without a stall if no group is larger than the first.
    """
    count = max(1, num_microbatches // pp_size)
    size, larger = divmod(num_microbatches, count)
    starts = [i * size + min(i, larger) for i in range(count + 1)]
    return tuple(map(range, starts, starts[1:]))


def order(pp_size: int, num_microbatches: int, num_chunks: int) -> list[tuple[int, int]]:
    """Return the (chunk, microbatch) pairs that each rank runs forward, in order."""
    pairs: list[tuple[int, int]] = []
    for group in rounds(pp_size, num_microbatches):
        for chunk in range(num_chunks):
            pairs += [(chunk, i) for i in group]
    return pairs


def invalid(pp_size: int, num_microbatches: int, stages_per_rank: int) -> str | None:
    """Return why the sizes are invalid, or None: each rank needs several stages."""
    if stages_per_rank == 1:
        return "stages_per_rank=1; use stages_per_rank = 2 or more, or the schedule 'one_f_one_b'"
    return None


def bubble(
    pp_size: int, num_microbatches: int, stages_per_rank: int, backward: float = 2.0
) -> float:
    """Return the idle fraction, (p-1)/(v*m+p-1) for m >= p; below p, more waits per chunk."""
    busy = stages_per_rank * num_microbatches
    waiting = (stages_per_rank - 1) * max(0, pp_size - num_microbatches) + pp_size - 1
    return waiting / (busy + waiting)


def peak_in_flight(pp_size: int, num_microbatches: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return, per rank, the most (stage, microbatch) pairs with live activations."""
    most = stages_per_rank * num_microbatches
    warmups = [_warmup(rank, pp_size, num_microbatches, stages_per_rank) for rank in range(pp_size)]
    return tuple(min(most, warmup + 1) for warmup in warmups)


def _warmup(rank: int, pp_size: int, num_microbatches: int, num_chunks: int) -> int:
    """Return the warm-up: all but one chunk of the first group, and two per later rank."""
    return (num_chunks - 1) * len(rounds(pp_size, num_microbatches)[0]) + 2 * (pp_size - 1 - rank)
