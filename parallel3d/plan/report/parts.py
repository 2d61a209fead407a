"""The planner's second table: the memory and step time of each row by parts."""

from dataclasses import replace

from rich.console import Console
from rich.text import Text

from parallel3d.base import terminal
from parallel3d.base.terminal import Column
from parallel3d.plan.memory.peak import PARTS
from parallel3d.plan.report.plan_table import seconds, three
from parallel3d.plan.search.plans import Plan, Request
from parallel3d.plan.search.remedy import gib
from parallel3d.plan.time.step import TIMES

_SHORT = {
    "gathered": "gath.", "gradients": "grads", "optimizer": "optim", "activations": "activ.",
    "compute": "comp.", "bubble": "waits", "pipeline": "pipe", "offload": "offl.",
}  # fmt: skip


def show(plans: tuple[Plan, ...], request: Request, out: Console) -> None:
    """Print the memory and step time of each plan by parts, without parts that no plan has.

    Memory is of the fullest pipeline rank, seconds are of the busiest. TFLOP/s count recomputation.
    MFU counts half of the attention, as its causal mask does.
    """
    memory = [part for part in PARTS if any(plan.memory.parts.get(part) for plan in plans)]
    times = [part for part in TIMES if any(_shown(plan, part) != "–" for plan in plans)]
    rule = Column("│", rule=True)
    columns = [Column("#"), *(Column(_SHORT.get(part, part)) for part in memory)]
    columns += [replace(rule, line=1), *(Column(_SHORT.get(part, part), line=1) for part in times)]
    columns += [replace(rule, line=2), Column("TF/s hw", line=2)]
    has_peak = request.hardware.peak(request.base.precision) is not None
    if has_peak:
        columns.append(Column("MFU causal", line=2))
    if request.num_tokens is not None:
        columns.append(Column("dev-hours", line=2))
    flops, rows = request.flops, []
    for number, plan in enumerate(plans, 1):
        sizes = [plan.memory.parts.get(part, 0) for part in memory]
        added = flops.recomputed[plan.setting.recompute]
        cells = [str(number), *(gib(size) if size else "–" for size in sizes), "│"]
        cells += [_shown(plan, part) for part in times]
        cells += ["│", three(plan.per_device(flops.full + added) / 1e12)]
        if has_peak:
            cells.append(f"{100 * (plan.mfu(flops.causal) or 0):.0f} %")
        if plan.device_hours is not None:
            cells.append(three(plan.device_hours))
        rows.append(cells)
    title = "by parts: GiB of the fullest rank │ seconds of the busiest │ with recomputation"
    out.print(Text(f"\n{title}", "bold"))
    terminal.show(out, columns, rows, first="bold")


def _shown(plan: Plan, part: str) -> str:
    share = plan.time.parts[part]
    return seconds(share) if share > 1e-3 * plan.time.seconds else "–"
