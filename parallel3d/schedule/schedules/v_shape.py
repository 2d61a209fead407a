"""1F1B on a V: down the ranks with the first half of the model, up again with the second.

Rank r holds the stages r and 2p-1-r. The activations of one are held long, those of the other
briefly, so that all ranks hold equally much. The placement is that of arXiv:2405.15362, the order
is our own. Two chunks shorten the bubble, as in `interleaved`, with the memory of 1F1B.
"""

from itertools import product

from parallel3d.schedule.schedule import Action, Op, Schedule


def schedule(pp_size: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """Return each rank's computes, in the order of slots, each with room for one F and then one B.

    Stage s runs F of microbatch i in slot 2i + s; its B follows after one slot for each B of a
    later stage. Of a rank's two stages one is even and one is odd, so no slot is used twice and,
    once the pipeline is full, none is free.
    """
    last = 2 * pp_size - 1

    def slot(action: Action) -> tuple[int, bool]:
        stage = action.stage if action.op == Op.F else 2 * last - action.stage
        return 2 * action.microbatch + stage, action.op == Op.B

    programs = []
    for rank in range(pp_size):
        stages = (rank, last - rank)
        computes = product((Op.F, Op.B), stages, range(num_microbatches))
        programs.append(tuple(sorted((Action(*compute) for compute in computes), key=slot)))
    placement = (*range(pp_size), *reversed(range(pp_size)))
    return Schedule("v_shape", num_microbatches, placement, tuple(programs))


def invalid(pp_size: int, num_microbatches: int, stages_per_rank: int) -> str | None:
    """Return why the sizes are invalid, or None: each rank needs two stages."""
    if stages_per_rank != 2:
        return (
            f"stages_per_rank={stages_per_rank}; use stages_per_rank = 2, one for each arm of the V"
        )
    return None


def bubble(
    pp_size: int, num_microbatches: int, stages_per_rank: int, backward: float = 2.0
) -> float:
    """Return the idle fraction: each rank waits 2(p-1) times for the longer of F and B.

    This is 2(p-1)/(3m+2(p-1)) if B = 2F. With fewer than p microbatches more waits are exposed.
    """
    short, long = sorted((1.0, backward))
    missing = max(0, pp_size - num_microbatches)
    waiting = 2 * (pp_size - 1) * long + 2 * missing * short
    return waiting / (2 * num_microbatches * (1.0 + backward) + waiting)


def peak_in_flight(pp_size: int, num_microbatches: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return, per rank, the most (stage, microbatch) pairs: 2p halves, as 1F1B's first rank."""
    m = num_microbatches
    return tuple(min(2 * m, m + rank + 1, 2 * pp_size) for rank in range(pp_size))
