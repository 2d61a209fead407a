"""Picture of a plan: each pipeline rank's actions over time, and the fullest rank's memory."""

from dataclasses import replace
from html import escape
from itertools import accumulate

from parallel3d.plan.memory.peak import saved_bytes
from parallel3d.plan.memory.room import gib
from parallel3d.plan.search.plans import Plan
from parallel3d.plan.setting import Setting
from parallel3d.plan.time.step import step_spans
from parallel3d.schedule import draw
from parallel3d.schedule.action import Op
from parallel3d.schedule.schedule import Spans

# of the panel of memory, in pixels
_LEFT = 72
_RIGHT = 24
_TOP = 50
_HEIGHT = 130

Points = list[tuple[float, float]]  # (seconds, bytes), in order


def memory_over_time(plan: Plan, setting: Setting, spans: Spans) -> tuple[float, Points]:
    """Return the fullest rank's other bytes, and its device bytes at each change.

    Activations live from the start of a forward to the end of its backward. The maximum equals the
    plan's total.
    """
    saved = saved_bytes(setting, plan.request.hardware)
    computes = [span for span in spans[plan.memory.pp_coord] if span.action.is_compute]
    last = Op.W if any(span.action.op == Op.W for span in computes) else Op.B
    changes = sorted(
        (start, saved[a.stage]) if a.op == Op.F else (end, -saved[a.stage])
        for a, start, end in computes
        if a.op in (Op.F, last)
    )
    held = [*accumulate(size for _, size in changes)]
    base = float(plan.memory.total - max(held))
    points = []
    for (time, size), after in zip(changes, held, strict=True):
        points += [(time, base + after - size), (time, base + after)]
    return base, points


def drawing(plan: Plan) -> tuple[str, object]:
    """Return the SVG of a plan's timeline and memory, and its trace for Perfetto."""
    flow, order, _ = plan.setting.choices
    total = plan.setting.num_microbatches
    drawn = draw.microbatches_drawn(flow.mesh.pp, total, order.stages_per_rank)
    setting = replace(plan.setting, num_microbatches=drawn)
    spans = step_spans(setting, plan.request.hardware)
    some = "" if drawn == total else f" ({drawn} of them drawn)"
    batches = f"{total} microbatches of {flow.micro_batch}{some}"
    title = f"{flow.mesh.label}, {order.schedule}, {batches}"
    above = draw.figure([(title, spans)], plan.time.bubble)
    height = draw.height_of(spans)
    below = [f'<g transform="translate(0 {height})">', *_panel(plan, setting, spans), "</g>"]
    return draw.framed(height + _TOP + _HEIGHT + 34, [above, *below]), draw.chrome_trace(spans)


def _panel(plan: Plan, setting: Setting, spans: Spans) -> list[str]:
    base, points = memory_over_time(plan, setting, spans)
    room = plan.request.hardware.memory_bytes.value
    begin = draw.start(spans)
    length = draw.seconds(spans)
    most = 1.05 * max(room, *(size for _, size in points))
    across = (draw.WIDTH - _LEFT - _RIGHT) / length

    def at(time: float, size: float) -> str:
        x = _LEFT + (time - begin) * across
        return f"{x:.1f},{_TOP + _HEIGHT * (1 - size / most):.1f}"

    end = begin + length
    curve = " ".join(at(*point) for point in [(begin, base), *points, (end, points[-1][1])])
    floor = f"{at(begin, 0)} {at(begin, base)} {at(end, base)} {at(end, 0)}"
    line = at(begin, room).split(",")[1]
    return [
        f'<text x="{_LEFT}" y="20" font-size="14" font-weight="bold">device memory of rank '
        f"{plan.memory.pp_coord} (the fullest): {escape(gib(plan.memory.total))} of "
        f"{gib(room)} GiB</text>",
        f'<text x="{_LEFT}" y="38" fill="#868e96">dark: all else ({gib(base)} GiB); '
        "light: activations of these microbatches; line: the device's memory</text>",
        f'<polygon points="{at(begin, base)} {curve} {at(end, base)}" fill="#ffd8a8"/>',
        f'<polygon points="{floor}" fill="#748ffc"/>',
        f'<line x1="{_LEFT}" x2="{draw.WIDTH - _RIGHT}" y1="{line}" y2="{line}" stroke="#e03131" '
        'stroke-dasharray="5 4"/>',
        f'<text x="{_LEFT - 8}" y="{float(line) + 4:.1f}" text-anchor="end" fill="#e03131">'
        f"{gib(room)}</text>",
        f'<text x="{_LEFT - 8}" y="{_TOP + _HEIGHT}" text-anchor="end">0</text>',
        f'<text x="{_LEFT}" y="{_TOP + _HEIGHT + 20}" fill="#868e96">time →, one step, '
        f"{length:.3g} s</text>",
    ]
