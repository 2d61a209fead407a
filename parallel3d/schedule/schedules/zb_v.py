"""ZB-V: two stages per rank on a V, backwards split, no idle time inside (arXiv:2401.10241).

Rank r holds the stages r and 2p-1-r, as in `v_shape`. If F, I and W take equally long, a rank never
waits from its first forward to its last weight gradient. It holds 2p halves of a rank's layers, as
much as 1F1B's first rank, which holds p of them in full. The order below is our own.
"""

from collections import Counter

from parallel3d.schedule.schedule import Action, Op, Schedule


def schedule(pp_size: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """Return each rank's computes, of its early stage (down the V) and its late one (up again).

    1. The early stage's forwards fill the pipeline.
    2. Both stages take turns, each with F, I and W; the late stage's backward follows its forward.
    3. At the end, input gradients that an earlier rank waits for go first, and weight gradients
       fill the gaps.
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
    """Return a rank's program; `to_the_turn` counts the ranks from this one to the V's turn."""
    done: Counter[tuple[Op, int]] = Counter()
    program: list[Action] = []

    def run(stage: int, ops: str) -> None:
        for op in map(Op, ops):
            if (i := done[op, stage]) < num_microbatches:
                program.append(Action(op, stage, i))
                done[op, stage] += 1

    def remains(op: Op) -> bool:
        return min(done[op, early], done[op, late]) < num_microbatches

    for _ in range(2 * to_the_turn - 1):
        run(early, "F")
    for _ in range(early):
        run(late, "F")
        run(early, "F")
    for _ in range(to_the_turn):
        run(late, "FIW")
    while remains(Op.F):
        run(early, "FIW")
        run(late, "FIW")
    for _ in range(early):
        run(early, "I")
        run(late, "I")
    for _ in range(to_the_turn):
        run(early, "IW")
    while remains(Op.I):
        run(late, "I")
        run(early, "I")
    while remains(Op.W):
        run(late, "W")
        run(early, "W")
    return tuple(program)


def invalid(pp_size: int, num_microbatches: int, stages_per_rank: int) -> str | None:
    """Return why the sizes are invalid, or None: two stages per rank, enough microbatches."""
    if stages_per_rank != 2:
        return (
            f"stages_per_rank={stages_per_rank}; use stages_per_rank = 2, one for each arm of the V"
        )
    if num_microbatches < 2 * pp_size - 1:
        few = f"{num_microbatches} microbatches do not fill a V of {pp_size} ranks"
        return f"{few}; use {2 * pp_size - 1} microbatches or more, or the schedule 'v_shape'"
    return None


def bubble(
    pp_size: int, num_microbatches: int, stages_per_rank: int, backward: float = 2.0
) -> float:
    """Return the idle fraction: each rank waits for p-1 forwards at its start, and at its end.

    This is (p-1)/(6m+p-1) if F, I and W take equally long, the paper's zero bubble; the rest is
    that ranks do not start together. If I and W (half a backward each) are longer, each rank waits
    for p-1 of them; if they are shorter, F leaves gaps besides.
    """
    half = backward / 2
    if half >= 1:
        waiting = (pp_size - 1) * half
    else:
        waiting = max(0.0, (pp_size - 1) * (2 - half) - min(half, 1 - half))
    return waiting / (2 * num_microbatches * (1.0 + backward) + waiting)


def peak_in_flight(pp_size: int, num_microbatches: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return, per rank, the most (stage, microbatch) pairs held from F to W: 2p."""
    return (2 * pp_size,) * pp_size
