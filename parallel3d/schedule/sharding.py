"""Adds the actions that gather, release and reduce ZeRO's shards to a rank's program.

Programs have them if weights stay gathered for several microbatches, or if gradients are reduced
once a step. They delay no compute except those that need their result.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from parallel3d.schedule.action import Action, Op

Weights = Literal["per_microbatch", "per_pass", "per_step"]
SHARDING = frozenset({Op.GATHER, Op.RELEASE, Op.REDUCE})
_USES_WEIGHTS = frozenset({Op.F, Op.B, Op.I})  # W needs only a stage's input and gradient
_MAKES_GRADIENT = frozenset({Op.B, Op.W})
Program = tuple[Action, ...]


def with_sharding(program: Program, weights: Weights, reduces_once: bool) -> Program:
    """Return a rank's program with GATHER, RELEASE and REDUCE added.

    - `weights`: "per_microbatch" leaves gathering to F and B; "per_pass" holds a stage's weights
      during its forwards, and again during its backwards; "per_step" from first use to last.
    - `reduces_once`: add a REDUCE after the stage's last gradient.

    A GATHER is placed where the previous stage's window begins, so that it overlaps with its
    computes.
    """
    before: dict[int, list[Action]] = {}
    after: dict[int, list[Action]] = {}
    if reduces_once:
        for index in _last_uses(program, _MAKES_GRADIENT).values():
            after.setdefault(index, []).append(program[index]._replace(op=Op.REDUCE))
    if weights != "per_microbatch":
        windows = sorted(_windows(program, weights))
        free: dict[int, int] = {}  # end of a stage's earlier window
        for i, (first, last, stage) in enumerate(windows):
            ahead = max(windows[max(i - 1, 0)][0], free.get(stage, 0))
            free[stage] = last + 1
            before.setdefault(ahead, []).append(program[first]._replace(op=Op.GATHER))
            after.setdefault(last, []).insert(0, program[last]._replace(op=Op.RELEASE))
    merged: list[Action] = []
    for index, action in enumerate(program):
        merged += [*before.get(index, ()), action, *after.get(index, ())]
    return _without_vain_releases(tuple(merged))


def _without_vain_releases(program: Program) -> Program:
    """Drop each RELEASE whose stage is gathered again before the next compute."""
    vain: set[int] = set()
    released: dict[int, int] = {}
    for index, action in enumerate(program):
        if action.op is Op.RELEASE:
            released[action.stage] = index
        elif action.op is Op.GATHER and action.stage in released:
            vain |= {released.pop(action.stage), index}
        elif action.is_compute:
            released.clear()
    return tuple(action for index, action in enumerate(program) if index not in vain)


def gathers(programs: Iterable[Program]) -> dict[Action, Action]:
    """Return the GATHER that each compute takes its weights from, where programs have them."""
    gather_of: dict[Action, Action] = {}
    for program in programs:
        held: dict[int, Action] = {}
        for action in program:
            if action.op is Op.GATHER:
                held[action.stage] = action
            elif action.op is Op.RELEASE:
                held.pop(action.stage, None)
            elif action.op in _USES_WEIGHTS and action.stage in held:
                gather_of[action] = held[action.stage]
    return gather_of


def _last_uses(program: Sequence[Action], ops: frozenset[Op]) -> dict[int, int]:
    """Return the index of each stage's last action of these kinds."""
    return {action.stage: i for i, action in enumerate(program) if action.op in ops}


def _windows(program: Program, weights: Weights) -> Iterator[tuple[int, int, int]]:
    """Yield the first and last index over which a stage stays gathered, and the stage."""
    uses: dict[int, list[int]] = {}
    for index, action in enumerate(program):
        if action.op in _USES_WEIGHTS:
            uses.setdefault(action.stage, []).append(index)
    for stage, indices in uses.items():
        forwards = [i for i in indices if program[i].op is Op.F]
        backwards = [i for i in indices if program[i].op is not Op.F]
        # Passes that overlap have no gap to release in.
        between = program[forwards[-1] + 1 : backwards[0]] if backwards else ()
        if weights == "per_pass" and any(action.is_compute for action in between):
            yield forwards[0], forwards[-1], stage
            yield backwards[0], backwards[-1], stage
        else:
            yield indices[0], indices[-1], stage
