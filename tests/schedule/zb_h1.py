"""ZB-H1: 1F1B with the backward in two parts, of which the second fills the bubble.

Our own reading of arXiv:2401.10241, section 3.1, older than the `zero_bubble` that is shipped and
written apart from it: the tests put it beside the shipped ones, and compare the two.
"""

from collections.abc import Iterator

from parallel3d.schedule.schedule import Action, Op, Schedule


def schedule(pp_size: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """The computes of each rank: F and I in the order of 1F1B, each W some turns after its I."""
    programs = tuple(tuple(_program(rank, pp_size, num_microbatches)) for rank in range(pp_size))
    return Schedule("zb_h1", num_microbatches, tuple(range(pp_size)), programs)


def _program(rank: int, pp_size: int, num_microbatches: int) -> Iterator[Action]:
    """A rank warms up with an F for each rank after it, and is late with a W for each before it."""
    ahead = pp_size - 1 - rank
    for turn in range(-ahead, num_microbatches + rank):
        if turn + ahead < num_microbatches:
            yield Action(Op.F, rank, turn + ahead)
        if 0 <= turn < num_microbatches:
            yield Action(Op.I, rank, turn)
        if turn >= rank:
            yield Action(Op.W, rank, turn - rank)


def invalid(pp_size: int, num_microbatches: int, stages_per_rank: int) -> str | None:
    """Why it cannot be used: one stage a rank, and enough microbatches to fill the pipeline."""
    if stages_per_rank != 1:
        return f"stages_per_rank={stages_per_rank}; use 1"
    if num_microbatches < pp_size:
        return f"num_microbatches={num_microbatches} on pp={pp_size}; use {pp_size} or more"
    return None


def bubble(
    pp_size: int, num_microbatches: int, stages_per_rank: int, backward: float = 2.0
) -> float:
    """The idle fraction; I and W take half of a backward each, so (p-1)(F+I-W) is (p-1)F."""
    return (pp_size - 1) / (num_microbatches * (1 + backward) + pp_size - 1)


def peak_in_flight(pp_size: int, num_microbatches: int, stages_per_rank: int) -> tuple[int, ...]:
    """Microbatches whose activations each rank holds at most: those of 1F1B's first rank."""
    return (pp_size,) * pp_size
