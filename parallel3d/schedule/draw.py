"""Pictures of a pipeline from Spans; planned and measured runs are drawn alike.

ZeRO's actions are drawn in lanes below a rank, one per stage: a box while weights are gathered
(GATHER), a line while they are held (until RELEASE), a box while gradients are reduced (REDUCE).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from colorsys import hls_to_rgb
from html import escape
from math import ceil
from statistics import mean
from typing import Any

from parallel3d.base.errors import ScheduleError
from parallel3d.schedule.action import Action, Cost, Op, Span, Spans
from parallel3d.schedule.schedule import Schedule, bubble, validate
from parallel3d.schedule.sharding import SHARDING

_NAMES = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "input gradient",
    Op.W: "weight gradient",
    Op.GATHER: "gather",
    Op.REDUCE: "reduce",
}
WIDTH = 1000  # width of a drawing
_COLUMNS = 100  # width of a grid
_HEAD = 8  # columns of "rank 0  "
_HUES = {Op.F: 0.59, Op.B: 0.38, Op.I: 0.48, Op.W: 0.09}
_LANE = 7  # height of a lane, with the gap above it
_LANE_COLOURS = {Op.GATHER: "#0c8599", Op.REDUCE: "#9c36b5"}
_HELD_COLOUR = "#66b8c4"
_MOST = 1_000  # computes of a planned drawing
_LEFT = 72  # margin left of a panel's rows
_TOP = 74  # margin above them
_ROW = 30  # height of a row
_PITCH = 36  # distance of two rows without lanes


def microbatches_drawn(pp_size: int, num_microbatches: int, stages_per_rank: int) -> int:
    """Return how many microbatches to draw: all, or few enough for a picture that can be read.

    Schedules run in rounds of as many microbatches as ranks: whole rounds are left out.
    """
    most = max(3 * pp_size, _MOST // (2 * pp_size * stages_per_rank))
    too_many = max(0, num_microbatches - most)
    return num_microbatches - pp_size * -(-too_many // pp_size)


def text_grid(spans: Spans) -> str:
    """Return one line of computes per rank, time to the right; `·` is an idle column.

    Whole times get an equal number of columns per unit, in panels if they are too many; other times
    are scaled to 100 columns.
    """
    length = seconds(spans)
    room = _COLUMNS - _HEAD
    spans = tuple(tuple(s for s in r if s.action.is_compute) for r in spans_from_zero(spans))
    columns = room / length  # per unit of time
    if all(span.start.is_integer() and span.end.is_integer() for rank in spans for span in rank):
        columns = 1.0 + max(len(str(span.action)) for rank in spans for span in rank)
    total = round(length * columns)
    rows = {}
    for coord, rank in enumerate(spans):
        row = ""
        for action, start, end in rank:
            row = row.ljust(round(start * columns), "·")
            row += _cell(action, round(end * columns) - len(row))
        rows[f"rank {coord}"] = row.ljust(total, "·")
    step = tick_step(8 / columns)
    ruler = ""
    for time in _ticks(step, length):
        if len(ruler) < round(time * columns) or not ruler:
            ruler = ruler.ljust(round(time * columns)) + f"{time:g}"
    lines = {"time": ruler[:total], **rows}
    width = total if total <= room else round(room // (step * columns) * step * columns)
    panels = []
    for left in range(0, total, width):
        shown = [f"{head:<{_HEAD}}{line[left : left + width]}" for head, line in lines.items()]
        panels.append("\n".join(line.rstrip() for line in shown))
    return "\n\n".join(panels)


def _cell(action: Action, width: int) -> str:
    """Return the longest label of an action that fits into `width` columns, the last one a gap."""
    for label in (str(action), f"{action.op}{action.microbatch}", str(action.op)):
        if len(label) <= width:
            return label if len(label) == width else label.ljust(width - 1, "─") + " "
    return "─" * width


def figure(panels: Sequence[tuple[str, Spans]], idle: float | None = None) -> str:
    """Return a drawing (SVG) of several (title, spans), one below the other, on one scale of time.

    Rows are ranks, colours operations. `idle`: the bubble, if the spans are only part of a step.
    """
    scale = (WIDTH - _LEFT - 24) / max(seconds(spans) for _, spans in panels)
    lines: list[str] = []
    y = 0
    for title, spans in panels:
        share = bubble(spans) if idle is None else idle
        lines += [*_heading(title, spans, share, y)]
        lines += [*_rows(spans_from_zero(spans), seconds(spans), scale, y + _TOP)]
        y += height_of(spans)
        lines += _axis(seconds(spans), scale, y - 18)
    return framed(y, lines)


def framed(height: int, lines: Sequence[str]) -> str:
    """Return a drawing (SVG) of these elements on a white ground, in the common width."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="Helvetica, Arial, sans-serif" '
        'font-size="12" fill="#343a40">'
    )
    ground = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return "\n".join([head, ground, *lines]) + "</svg>"


def _ticks(step: float, length: float) -> Iterator[float]:
    """Yield the multiples of `step` below `length`."""
    yield from (number * step for number in range(ceil(length / step)))


def tick_step(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is at least `least`."""
    steps = (digit * 10.0**exponent for exponent in range(-9, 12) for digit in (1, 2, 5))
    return next(step for step in steps if step >= least)


def _axis(length: float, scale: float, y: int) -> Iterator[str]:
    """Yield the times below the rows."""
    yield f'<text x="{_LEFT - 12}" y="{y}" text-anchor="end" fill="#868e96">time</text>'
    for time in _ticks(tick_step(90 / scale), length):
        x = _LEFT + time * scale
        yield (
            f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{y - 16}" y2="{y - 12}" stroke="#868e96"/>'
            f'<text x="{x:.2f}" y="{y}" text-anchor="middle" fill="#868e96">{time:g}</text>'
        )


def _heading(title: str, spans: Spans, idle: float, y: int) -> Iterator[str]:
    """Yield the title, and below it the bubble and the legend."""
    yield f'<text x="{_LEFT}" y="{y + 30}" font-size="17" font-weight="bold">{escape(title)}</text>'
    yield f'<text x="{_LEFT}" y="{y + 52}">bubble {idle:.1%}</text>'
    x = _LEFT + 110
    present = {span.action.op for rank in spans for span in rank}
    for op in filter(present.__contains__, _NAMES):
        shade = _LANE_COLOURS.get(op) or _shade(op, 0.4)
        yield f'<rect x="{x}" y="{y + 41}" width="13" height="13" rx="3" fill="{shade}"/>'
        yield f'<text x="{x + 19}" y="{y + 52}">{_NAMES[op]}</text>'
        x += 45 + 7 * len(_NAMES[op])
    legend = "numbers are microbatches, darker is a later stage"
    if Op.GATHER in present:
        legend = "lines: weights held, one lane per stage"
    yield f'<text x="{x}" y="{y + 52}" fill="#868e96">{legend}</text>'


def height_of(spans: Spans) -> int:
    """Return the height of a drawing of these spans, with title and axis."""
    return _TOP + _pitch(spans) * len(spans) + 34


def _pitch(spans: Spans) -> int:
    """Return the distance between two ranks' rows, with room for the lanes between them."""
    return _PITCH + _LANE * max(len(_lanes_of(rank)) for rank in spans)


def _rows(spans: Spans, length: float, scale: float, top: int) -> Iterator[str]:
    """Yield a row of boxes for each rank, with ZeRO's actions in lanes below it."""
    pitch = _pitch(spans)
    num_stages = 1 + max(s.action.stage for rank in spans for s in rank)
    for coord, rank in enumerate(spans):
        y = top + pitch * coord
        yield from _lane_boxes(rank, scale, y + _ROW)
        yield f'<text x="{_LEFT - 12}" y="{y + 20}" text-anchor="end">rank {coord}</text>'
        yield (
            f'<rect x="{_LEFT}" y="{y}" width="{length * scale:.2f}" height="{_ROW}" rx="4" '
            'fill="#f1f3f5"/>'
        )
        for action, start, end in (span for span in rank if span.action.is_compute):
            x0 = _LEFT + start * scale
            w = (end - start) * scale
            shade = _shade(action.op, action.stage / max(1, num_stages - 1))
            yield (
                f'<rect x="{x0 + 0.75:.2f}" y="{y}" width="{max(0.5, w - 1.5):.2f}" '
                f'height="{_ROW}" rx="3" fill="{shade}"><title>{action}: {start:g} to {end:g}'
                "</title></rect>"
            )
            if w > 2 + 7 * len(str(action.microbatch)):
                yield (
                    f'<text x="{x0 + w / 2:.2f}" y="{y + 19.5}" text-anchor="middle" '
                    f'fill="#ffffff">{action.microbatch}</text>'
                )


def _shade(op: Op, depth: float) -> str:
    """Return the colour of an operation; depth 0 is the first stage (light), 1 the last (dark)."""
    colour = hls_to_rgb(_HUES[op], 0.53 - 0.25 * depth, 0.5)
    return "#" + "".join(f"{round(255 * part):02x}" for part in colour)


def _is_drawn(action: Action) -> bool:
    return action.is_compute or action.op in SHARDING


def _lanes_of(rank: Sequence[Span]) -> dict[int, int]:
    """Return the lane, from the top, of each stage that a rank gathers or reduces."""
    stages = {span.action.stage for span in rank if span.action.op in SHARDING}
    return {stage: lane for lane, stage in enumerate(sorted(stages))}


def _held(rank: Sequence[Span]) -> Iterator[tuple[int, float, float]]:
    """Yield stage, start and end (seconds) of each time in which a rank holds gathered weights."""
    since: dict[int, float] = {}
    for action, start, end in rank:
        if action.op == Op.GATHER:
            since[action.stage] = end
        elif action.op == Op.RELEASE and action.stage in since:
            yield action.stage, since.pop(action.stage), start


def _lane_boxes(rank: Sequence[Span], scale: float, top: float) -> Iterator[str]:
    """Yield the lanes of a rank, from `top` down; the spans start at the drawing's zero."""
    lanes = _lanes_of(rank)

    def box(stage: int, start: float, end: float, down: int, style: str, title: str) -> str:
        x = _LEFT + start * scale
        width = max((end - start) * scale, 2.0)
        y = top + _LANE * lanes[stage] + down
        title = f"<title>{title}: {start:g} to {end:g}</title>"
        return f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" {style}>{title}</rect>'

    for stage, start, end in _held(rank):
        style = f'height="2" fill="{_HELD_COLOUR}"'
        yield box(stage, start, end, 3, style, f"stage {stage}'s weights are held")
    for action, start, end in rank:
        if colour := _LANE_COLOURS.get(action.op):
            style = f'height="6" rx="1" fill="{colour}"'
            yield box(action.stage, start, end, 1, style, str(action))


def chrome_trace(spans: Spans) -> dict[str, object]:
    """Return a trace for Perfetto or chrome://tracing: a process per rank, messages async."""
    events: list[dict[str, Any]] = []
    for coord, rank in enumerate(spans):
        name = {"name": f"rank {coord}"}
        events.append({"name": "process_name", "ph": "M", "pid": coord, "args": name})
        for number, (action, start, end) in enumerate(rank):
            event = {
                "name": str(action),
                "cat": action.op.value,
                "pid": coord,
                "tid": 0,
                "ts": start * 1e6,
                "args": {"stage": action.stage, "microbatch": action.microbatch},
            }
            if not action.is_compute:
                # Transfers overlap with computes and each other, which only async events can show.
                event["id"] = f"{coord}.{number}"
                events += [event | {"ph": "b"}, event | {"ph": "e", "ts": end * 1e6}]
            else:
                events.append(event | {"ph": "X", "dur": (end - start) * 1e6})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def spans_to_json(schedule: Schedule, spans: Spans) -> dict[str, Any]:
    """Return a measured run for `spans_from_json`, in seconds from the first start."""
    zero = min(span.start for rank in spans for span in rank)
    rows: list[list[list[str | float]]] = []
    for rank in spans:
        rows.append(
            [[str(a), round(start - zero, 6), round(end - zero, 6)] for a, start, end in rank]
        )
    return {
        "name": schedule.name,
        "num_microbatches": schedule.num_microbatches,
        "pp_coord_of_stage": list(schedule.pp_coord_of_stage),
        "spans": rows,
    }


def _span(text: str, start: float, end: float) -> Span:
    return Span(Action.parse(text), float(start), float(end))


def spans_from_json(data: dict[str, Any]) -> tuple[Schedule, Spans]:
    """Return the schedule that ran, and its spans; raise ScheduleError if not valid."""
    try:
        spans = tuple(tuple(_span(*row) for row in rank) for rank in data["spans"])
        programs = tuple(tuple(span.action for span in rank) for rank in spans)
        placement = tuple(map(int, data["pp_coord_of_stage"]))
        schedule = Schedule(data["name"], int(data["num_microbatches"]), placement, programs)
    except (KeyError, TypeError, ValueError) as error:
        raise ScheduleError(f"not a spans.json of a profiled run: {error!r}") from None
    validate(schedule)
    return schedule, spans


def mean_costs(spans: Spans) -> Cost:
    """Return the mean seconds of each compute of a stage, to simulate a run without jitter."""
    seconds: dict[tuple[Op, int], list[float]] = defaultdict(list)
    for rank in spans:
        for action, start, end in rank:
            seconds[action.op, action.stage].append(end - start)
    means = {place: mean(values) for place, values in seconds.items()}
    return lambda action: means[action.op, action.stage] if _is_drawn(action) else 0.0


def seconds(spans: Spans) -> float:
    """Return the seconds from the first drawn start to the last end."""
    return max(span.end for rank in spans_from_zero(spans) for span in rank)


def start(spans: Spans) -> float:
    """Return the start of the first drawn action."""
    return min(s.start for rank in spans for s in rank if _is_drawn(s.action))


def spans_from_zero(spans: Spans) -> Spans:
    """Return the drawn spans, sorted by time, with the first one at 0."""
    begin = start(spans)
    moved = []
    for rank in spans:
        drawn = [span for span in rank if _is_drawn(span.action)]
        drawn.sort(key=lambda span: span.start)
        moved.append(tuple(Span(a, float(s - begin), float(e - begin)) for a, s, e in drawn))
    return tuple(moved)
