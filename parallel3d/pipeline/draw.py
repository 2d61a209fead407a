"""Pictures of a pipeline, from Spans: a planned run and a measured one are drawn alike."""

from colorsys import hls_to_rgb
from html import escape
from math import ceil
from typing import Any

from parallel3d.pipeline.action import Action, Op, Spans
from parallel3d.pipeline.schedule import bubble

_NAMES = {Op.F: "forward", Op.B: "backward", Op.I: "input gradient", Op.W: "weight gradient"}
_HEAD = 8  # columns of "rank 0  "
_HUES = {Op.F: 0.59, Op.B: 0.38, Op.I: 0.48, Op.W: 0.09}


def text_grid(spans: Spans, width: int = 100) -> str:
    """One line per rank, time to the right, a `·` for each column in which the rank is idle.

    Where all times are whole numbers, each unit of time has the same number of columns; a grid
    too wide even with short labels ("F0" for "2F0", if each rank has one stage) is cut into
    panels. Measured times are scaled to `width`.
    """
    spans, length = _from_zero(spans)
    one_stage = all(s.action.stage == coord for coord, rank in enumerate(spans) for s in rank)
    full = 1 + max(len(str(span.action)) for rank in spans for span in rank)
    short = full - 2 if one_stage else full - 1
    columns, packed = (width - _HEAD) / length, False  # columns per unit of time
    if all(time.is_integer() for rank in spans for _, *times in rank for time in times):
        packed = short <= columns < full
        columns = int(columns) if packed else full

    def labels(action: Action) -> tuple[str, ...]:
        brief = f"{action.op}{action.microbatch}" if one_stage else str(action)
        return (brief,) if packed else (str(action), brief, str(action.op))

    rows = []
    for rank in spans:
        row = ""
        for action, start, end in rank:
            row = row.ljust(round(start * columns), "·")
            row += _cell(labels(action), round(end * columns) - len(row))
        rows.append(row.ljust(round(length * columns), "·"))

    steps = (digit * 10.0**exponent for exponent in range(-9, 12) for digit in (1, 2, 5))
    step = next(step for step in steps if step * columns >= 8)  # from one tick to the next
    ruler = ""
    for tick in range(ceil(length / step)):
        ruler = ruler.ljust(round(tick * step * columns)) + f"{tick * step:g}"
    heads = ["time", *(f"rank {coord}" for coord in range(len(spans)))]
    return _panels(heads, [ruler[: len(rows[0])], *rows], width - _HEAD, step * columns)


def _panels(heads: list[str], lines: list[str], room: int, unit: float) -> str:
    """The lines with their heads, cut where they pass `room` into panels of whole units."""
    panel = len(lines[-1]) if len(lines[-1]) <= room else int(max(1, room // unit) * unit)
    return "\n\n".join(
        "\n".join(
            (head.ljust(_HEAD) + line[left : left + panel]).rstrip()
            for head, line in zip(heads, lines, strict=True)
        )
        for left in range(0, len(lines[-1]), panel)
    )


def _cell(labels: tuple[str, ...], width: int) -> str:
    """The first of the labels that fits, in exactly `width` columns, the last one a gap."""
    for label in labels:
        if len(label) <= width:
            return label if len(label) == width else label.ljust(width - 1, "─") + " "
    return "─" * width


def svg(spans: Spans, title: str = "", width: int = 1000) -> str:
    """A drawing of the computes: rows are ranks, colours operations, darker for later stages."""
    spans, length = _from_zero(spans)
    left, top, row, pitch = 72, 74, 30, 36
    num_stages = 1 + max(span.action.stage for rank in spans for span in rank)
    scale = (width - left - 24) / length
    bottom = top + pitch * len(spans)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 34}" '
        f'width="{width}" height="{bottom + 34}" font-family="Helvetica, Arial, sans-serif" '
        'font-size="12" fill="#343a40">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{left}" y="30" font-size="17" font-weight="bold">{escape(title)}</text>',
        f'<text x="{left}" y="52">bubble {bubble(spans):.1%}</text>',
    ]
    x = left + 110
    present = {span.action.op for rank in spans for span in rank}
    for op in filter(present.__contains__, _NAMES):
        out.append(f'<rect x="{x}" y="41" width="13" height="13" rx="3" fill="{_shade(op, 0.4)}"/>')
        out.append(f'<text x="{x + 19}" y="52">{_NAMES[op]}</text>')
        x += 45 + 7 * len(_NAMES[op])
    legend = "numbers are microbatches, darker is a later stage"
    out.append(f'<text x="{x}" y="52" fill="#868e96">{legend}</text>')
    for coord, rank in enumerate(spans):
        y = top + pitch * coord
        out.append(f'<text x="{left - 12}" y="{y + 20}" text-anchor="end">rank {coord}</text>')
        out.append(
            f'<rect x="{left}" y="{y}" width="{length * scale:.2f}" height="{row}" rx="4" '
            'fill="#f1f3f5"/>'
        )
        for action, start, end in rank:
            x0, w = left + start * scale, (end - start) * scale
            shade = _shade(action.op, action.stage / max(1, num_stages - 1))
            out.append(
                f'<rect x="{x0 + 0.75:.2f}" y="{y}" width="{max(0.5, w - 1.5):.2f}" '
                f'height="{row}" rx="3" fill="{shade}"><title>{action}: {start:g} to {end:g}'
                "</title></rect>"
            )
            if w > 5 + 7 * len(str(action.microbatch)):
                out.append(
                    f'<text x="{x0 + w / 2:.2f}" y="{y + 19.5}" text-anchor="middle" '
                    f'fill="#ffffff">{action.microbatch}</text>'
                )
    out.append(f'<text x="{left}" y="{bottom + 16}" fill="#868e96">time →</text></svg>')
    return "\n".join(out)


def _shade(op: Op, depth: float) -> str:
    """The colour of an operation on a stage at `depth`, from 0 (first, light) to 1 (last, dark)."""
    return "#" + "".join(
        f"{round(255 * c):02x}" for c in hls_to_rgb(_HUES[op], 0.53 - 0.25 * depth, 0.5)
    )


def chrome_trace(spans: Spans) -> dict[str, Any]:
    """The spans for Perfetto or chrome://tracing: a process per rank, transfers beside computes."""
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
            if action.is_send or action.is_receive:
                # Transfers overlap with computes and each other, which only async events may.
                event["id"] = f"{coord}.{number}"
                events += [event | {"ph": "b"}, event | {"ph": "e", "ts": end * 1e6}]
            else:
                events.append(event | {"ph": "X", "dur": (end - start) * 1e6})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _from_zero(spans: Spans) -> tuple[Spans, float]:
    """The computes by time, the first starting at 0, and the time at which the last one ends."""
    computes = [[span for span in rank if span.action.is_compute] for rank in spans]
    begin = min(span.start for rank in computes for span in rank)
    shifted = tuple(
        tuple(
            s._replace(start=float(s.start - begin), end=float(s.end - begin))
            for s in sorted(rank, key=lambda s: s.start)
        )
        for rank in computes
    )
    return shifted, max(span.end for rank in shifted for span in rank)
