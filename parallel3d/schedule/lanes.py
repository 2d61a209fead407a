"""What ZeRO gathers, holds and reduces, drawn in lanes below a rank's computes.

A stage has a lane of its own below its rank: a box while its weights come (GATHER), a line for as
long as they are held (until RELEASE), and a box while its gradients are reduced (REDUCE).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from parallel3d.schedule.action import Action, Op, Span, Spans
from parallel3d.schedule.fold import Timeline
from parallel3d.schedule.sharding import SHARDING

HEIGHT = 7  # of a lane in a picture, with the gap above it
NAMES = {Op.GATHER: "gather", Op.REDUCE: "reduce"}
COLOURS = {Op.GATHER: "#0c8599", Op.REDUCE: "#9c36b5"}
_HELD = "#66b8c4"
_LETTERS = {Op.GATHER: "G", Op.RELEASE: "X", Op.REDUCE: "R"}
LEGEND = "G: gathers a stage's weights, X: lets go of them, R: reduces its gradients"


class HeldWeights(NamedTuple):
    """A stage's weights from the end of a GATHER to the RELEASE, in seconds."""

    stage: int
    start: float
    end: float


def is_drawn(action: Action) -> bool:
    """Whether a picture of the pipeline shows it: computes, and what ZeRO does."""
    return action.is_compute or action.op in SHARDING


def lanes_of(rank: Sequence[Span]) -> dict[int, int]:
    """The lane of each stage of which a rank gathers or reduces anything, from the top."""
    stages = {span.action.stage for span in rank if span.action.op in SHARDING}
    return {stage: lane for lane, stage in enumerate(sorted(stages))}


def height(spans: Spans) -> int:
    """What the lanes add to the height of each row of a picture."""
    return HEIGHT * max(len(lanes_of(rank)) for rank in spans)


def held(rank: Sequence[Span]) -> Iterator[HeldWeights]:
    """For how long a rank holds the weights of each stage, window by window."""
    since: dict[int, float] = {}
    for action, start, end in rank:
        if action.op == Op.GATHER:
            since[action.stage] = end
        elif action.op == Op.RELEASE and action.stage in since:
            yield HeldWeights(action.stage, since.pop(action.stage), start)


def svg(rank: Sequence[Span], timeline: Timeline, *, left: float, top: float, scale: float) -> str:
    """The lanes of a rank; `rank` counts from the picture's own zero, `top` is below its row."""
    lanes = lanes_of(rank)
    out = []

    def place(stage: int, start: float, end: float) -> tuple[float, float, float]:
        x, to = (left + timeline.at(time) * scale for time in (start, end))
        return x, max(to - x, 2.0), top + HEIGHT * lanes[stage]

    for stage, start, end in held(rank):
        x, width, y = place(stage, start, end)
        out.append(
            f'<rect x="{x:.2f}" y="{y + 3}" width="{width:.2f}" height="2" fill="{_HELD}">'
            f"<title>stage {stage}'s weights are held: {start:g} to {end:g}</title></rect>"
        )
    for action, start, end in rank:
        if action.op in COLOURS:
            x, width, y = place(action.stage, start, end)
            out.append(
                f'<rect x="{x:.2f}" y="{y + 1}" width="{width:.2f}" height="6" rx="1" '
                f'fill="{COLOURS[action.op]}"><title>{action}: {start:g} to {end:g}</title></rect>'
            )
    return "\n".join(out)


def text(rank: Sequence[Span], timeline: Timeline, columns: float) -> str:
    """One line: G2 where stage 2 is gathered, X2 where it is let go of, R2 where it is reduced.

    A mark is as long as what it stands for; where it has no room it moves to the right.
    """
    line = ""
    for action, start, end in sorted(rank, key=lambda span: span.start):
        if action.op not in _LETTERS:
            continue
        at, to = (round(timeline.at(time) * columns) for time in (start, end))
        mark = f"{_LETTERS[action.op]}{action.stage}"
        line = line.ljust(at) + (" " if len(line) > at else "")
        line += mark.ljust(to - len(line), "─")
    return line
