"""ZB-V: two stages a rank on a V, backwards split, no idle time in the middle (arXiv:2401.10241).

Rank r holds the stages r and 2p-1-r, as in `v_shape`. Where F, I and W take equally long, a rank
never waits from its first forward to its last weight gradient, and holds the 2p halves of a rank's
layers that 1F1B's first rank holds as p wholes. The order below is our own.
"""

from collections import Counter

from parallel3d.schedule.schedule import Action, Op, Schedule


def schedule(pp_size: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """The computes of each rank, of its early stage (down the V) and its late one (up again).

    The early stage's forwards fill the pipeline; then the late stage, whose backward follows its
    forward at once, takes turns with it, each with all three of F, I and W; in the end the inputs'
    gradients go first, where a rank before waits for them, and the weights' fill what is left.
    """
    last = 2 * pp_size - 1
    return Schedule(
        "zb_v",
        num_microbatches,
        (*range(pp_size), *reversed(range(pp_size))),
        tuple(
            _program(rank, last - rank, pp_size - rank, num_microbatches) for rank in range(pp_size)
        ),
    )


def _program(early: int, late: int, to_the_turn: int, num_microbatches: int) -> tuple[Action, ...]:
    """`to_the_turn`: ranks from this one to the one on which the V turns, both counted."""
    done: Counter[tuple[Op, int]] = Counter()
    program: list[Action] = []

    def run(stage: int, ops: str) -> None:
        for op in map(Op, ops):
            if (i := done[op, stage]) < num_microbatches:
                program.append(Action(op, stage, i))
                done[op, stage] += 1

    def left(op: Op) -> bool:
        return min(done[op, early], done[op, late]) < num_microbatches

    for _ in range(2 * to_the_turn - 1):
        run(early, "F")
    for _ in range(early):
        run(late, "F")
        run(early, "F")
    for _ in range(to_the_turn):
        run(late, "FIW")
    while left(Op.F):
        run(early, "FIW")
        run(late, "FIW")
    for _ in range(early):
        run(early, "I")
        run(late, "I")
    for _ in range(to_the_turn):
        run(early, "IW")
    while left(Op.I):
        run(late, "I")
        run(early, "I")
    while left(Op.W):
        run(late, "W")
        run(early, "W")
    return tuple(program)


def invalid(pp_size: int, num_microbatches: int, stages_per_rank: int) -> str | None:
    """Why two stages a rank are needed, and enough microbatches to fill the V."""
    if stages_per_rank != 2:
        return f"stages_per_rank={stages_per_rank}; a V has two arms, use 2"
    if num_microbatches < 2 * pp_size - 1:
        few = f"{num_microbatches} microbatches do not fill a V of {pp_size} ranks"
        return f"{few}; use {2 * pp_size - 1} or more, or the schedule 'v_shape'"
    return None


def bubble(
    pp_size: int, num_microbatches: int, stages_per_rank: int, backward: float = 2.0
) -> float:
    """The idle fraction: p-1 forwards before the first and behind the last compute of each rank.

    That is (p-1)/(6m+p-1) where F, I and W take equally long, which is the paper's zero bubble
    (what remains is that ranks do not start together). Where I and W (half a backward each) are
    longer each rank waits for p-1 of them; where they are shorter, F leaves gaps besides.
    """
    half = backward / 2
    if half >= 1:
        waiting = (pp_size - 1) * half
    else:
        waiting = max(0.0, (pp_size - 1) * (2 - half) - min(half, 1 - half))
    return waiting / (2 * num_microbatches * (1.0 + backward) + waiting)


def peak_in_flight(pp_size: int, num_microbatches: int, stages_per_rank: int) -> tuple[int, ...]:
    """(stage, microbatch) pairs whose activations each rank holds at most, from F to W: 2p."""
    return (2 * pp_size,) * pp_size
