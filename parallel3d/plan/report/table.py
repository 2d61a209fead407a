"""The planner's table on a terminal, and one of its rows in detail."""

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from parallel3d.config.deepspeed import offload_in_words
from parallel3d.plan.memory.peak import Memory
from parallel3d.plan.search.best_first import Found
from parallel3d.plan.search.plans import Plan, Request
from parallel3d.plan.search.remedy import gib
from parallel3d.plan.setting import Setting

PIPED = 132  # columns where there is no terminal to ask
_BAR = 8  # columns of the bar of memory
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_WIDE = 112  # columns from which there is room for all
_COLOURS = {
    "weights": "blue", "gathered": "cyan", "gradients": "green", "optimizer": "magenta",
    "activations": "yellow", "logits": "red", "buffers": "bright_black", "margin": "bright_black",
    "compute": "blue", "bubble": "bright_black", "tensor": "magenta", "pipeline": "cyan",
    "data": "green", "offload": "yellow", "optimizer_step": "red",
}  # fmt: skip


def show(found: Found, request: Request, console: Console) -> None:
    """Print the rows: those that fit, and below them the faster ones that do not, with remedies."""
    console.print(heading(request))
    if found.plans:
        console.print(_table(found.plans, 1, request, console.width))
    if found.too_large:
        word = "faster, but too large" if found.plans else "too large"
        console.print(Text(f"\n{word}", "bold"))
        console.print(_table(found.too_large, len(found.plans) + 1, request, console.width))
        for number, plan in enumerate(found.too_large, len(found.plans) + 1):
            console.print(Text(f"{number:>2}  {plan.reason}"))
            console.print(Text(f"    smallest change: {plan.remedy}"))


def closing(found: Found, console: Console) -> None:
    """Print how the rows were found and what can be done with them."""
    if found.plans:
        each = "the best" if found.per_mesh == 1 else f"the best {found.per_mesh}"
        tail = '--explain N shows row N; "mesh": "plan" in a config takes row 1'
        if found.num_hidden:
            tail += f"; without --rows {found.num_hidden} faster ones that do not fit are shown"
        console.print(
            Text(f"\n{each} of each mesh, {found.num_simulated} simulated; {tail}", "dim")
        )


def heading(request: Request) -> Text:
    """What was asked, in a line or two."""
    config, hardware = request.config, request.hardware
    seq, batch = request.base.shape.seq, request.global_batch_size
    tokens = "" if request.num_tokens is None else f", {count(request.num_tokens)} tokens in all"
    text = Text(f"{config.model.family} of {count(request.base.num_params)} parameters", "bold")
    text.append(
        f" in {request.base.precision} on {request.devices:,} x {hardware.name}; a step of "
        f"{batch:,} x {seq:,} = {count(batch * seq)} tokens{tokens}",
        "not bold",
    )
    if request.fixed:
        fixed = ", ".join(f"{name} = {value}" for name, value in request.fixed.items())
        text.append(f"\nfixed: {fixed}", "not bold")
    return text


def _table(plans: tuple[Plan, ...], first: int, request: Request, width: int) -> Table:
    wide = width >= _WIDE
    gap = (0, 2 if wide else 1, 0, 0)
    table = Table(box=None, padding=gap, pad_edge=False, header_style="bold underline")
    offloads = any(plan.offload != "none" for plan in plans)
    unit, days = _unit(plans[0].days) if wide and plans[0].days is not None else ("", 0.0)
    for head, justify, shown in _COLUMNS:
        if shown == "" or (shown == "wide" and wide) or (shown == "offload" and offloads):
            table.add_column(head, justify=justify, no_wrap=True)
    if days:
        table.add_column(unit, justify="right", no_wrap=True)
    for number, plan in enumerate(plans, first):
        cells = _cells(number, plan, request, wide, offloads, days)
        table.add_row(*cells, style="bold" if number == 1 else "")
    return table


_COLUMNS: tuple[tuple[str, Literal["left", "right"], str], ...] = (
    ("#", "right", ""),
    ("pp×dp×tp", "left", ""),
    ("ZeRO", "left", ""),
    ("offload", "left", "offload"),
    ("micro×M", "right", ""),
    ("schedule", "left", ""),
    ("recompute", "left", ""),
    ("GiB", "right", ""),
    ("of device", "left", "wide"),
    ("s/step", "right", ""),
    ("bubble", "right", ""),
    ("tokens/s", "right", ""),
    ("TFLOP/s", "right", ""),
    ("MFU", "right", "wide"),
)  # fmt: skip


def _cells(
    number: int, plan: Plan, request: Request, wide: bool, offloads: bool, days: float
) -> Iterator[str | Text]:
    s = plan.setting
    several = f" ×{s.stages_per_rank}" if s.stages_per_rank > 1 else ""
    yield str(number)
    yield f"{s.pp}×{s.dp}×{s.tp}" + (" sp" if s.sequence_parallel else "")
    yield f"{s.zero_stage}" + ("" if s.reduces_once or s.zero_stage == 2 else " each")
    if offloads:
        short = {"none": "–", "cpu": "{}", "nvme": "{} nvme"}
        words = [
            short[device].format(word)
            for word, device in (("opt", s.offload_optimizer), ("param", s.offload_param))
            if device != "none"
        ]
        yield "+".join(words) or "–"
    yield f"{s.shape.batch}×{s.num_microbatches}"
    yield s.schedule + several
    yield "–" if s.recompute == "none" else s.recompute
    yield gib(plan.memory.total)
    if wide:
        yield _bar(plan.memory.total / request.hardware.memory_bytes.value)
    yield seconds(plan.time.seconds)
    yield f"{100 * plan.bubble:.1f} %"
    yield count(plan.tokens_per_second)
    flops = request.flops.full
    yield f"{plan.per_device(flops) / 1e12:.{0 if plan.per_device(flops) >= 1e13 else 2}f}"
    if wide:
        mfu = plan.mfu(flops)
        yield "–" if mfu is None else f"{100 * mfu:.0f} %"
    if days:
        assert plan.days is not None
        yield three(plan.days / days)


def _bar(share: float, width: int = _BAR) -> Text:
    """A bar as long as a share of what there is; red where there is more than all of it."""
    if share > 1:
        return Text("█" * width + f" {share:.1f}×", "red")
    eighths = round(share * width * 8)
    bar = "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
    text = Text(bar, "yellow" if share > 0.9 else "green")
    text.append("·" * (width - len(bar)), "bright_black")
    return text


def explain(plan: Plan, console: Console) -> None:
    """Print a plan in detail: memory and time by parts, FLOP/s by each convention, the duration."""
    request, flops = plan.request, plan.request.flops
    console.print(heading(request))
    console.print(Text("\n".join(lines_of(plan.setting))))
    show_memory(plan.memory, console)
    console.print(Text("\nstep of the busiest pp rank", "bold"))
    whole = plan.time.seconds
    parts = {name: part for name, part in plan.time.parts.items() if part > 1e-6 * whole}
    _print_parts(parts, whole, lambda part: f"{seconds(part):>8} s  ", console)
    added = flops.recomputed[plan.setting.recompute]
    console.print(
        f"\n{count(plan.tokens_per_second)} tokens/s; TFLOP/s of a device: "
        f"{plan.per_device(flops.full) / 1e12:.4g} by the model, "
        f"{plan.per_device(flops.full + added) / 1e12:.4g} with recomputation"
    )
    if (full := plan.mfu(flops.full)) is not None:
        causal = plan.mfu(flops.causal)
        console.print(
            f"MFU {100 * full:.1f} % with attention in full, {100 * (causal or 0):.1f} % with its "
            "causal half"
        )
    if plan.days is not None and plan.device_hours is not None:
        console.print(
            f"{count(request.num_tokens or 0)} tokens take {duration(plan.days)}, "
            f"{three(plan.device_hours)} device-hours"
        )
    else:
        console.print("how long the run takes is open: its length is in epochs of a corpus")
    if not plan.fits:
        console.print(Text(f"\ndoes not fit: {plan.reason}\nsmallest change: {plan.remedy}", "red"))


def show_memory(memory: Memory, console: Console) -> None:
    """Print the memory of the fullest rank by parts."""
    parts = {name: size for name, size in memory.parts.items() if size}
    console.print(Text(f"\nmemory of pp rank {memory.pp_coord}, the fullest", "bold"))
    _print_parts(parts, memory.total, lambda size: f"{gib(size):>8} GiB", console)
    for name, size in (("host", memory.host), ("nvme", memory.nvme)):
        if size:
            console.print(f"  {name:<14}{gib(size):>8} GiB for each device")


def lines_of(setting: Setting) -> Iterator[str]:
    """The choices of a setting, in the config's words."""
    s = setting
    split = ", sequence parallel" if s.sequence_parallel else ""
    several = f" with {s.stages_per_rank} stages a rank" if s.stages_per_rank > 1 else ""
    reduced = "once a step" if s.reduces_once else "after each microbatch"
    yield f"mesh      pp {s.pp} × dp {s.dp} × tp {s.tp}{split}"
    yield (
        f"pipeline  {s.schedule}{several}, {s.num_microbatches} microbatches of {s.shape.batch}, "
        f"recompute {s.recompute}"
    )
    offload = offload_in_words(s.offload_optimizer, s.offload_param)
    yield f"state     ZeRO-{s.zero_stage}, gradients reduced {reduced}, offload: {offload}"


def duration(days: float) -> str:
    """A time in the unit that suits it."""
    unit, size = _unit(days)
    return f"{three(days / size)} {unit}"


def _unit(days: float) -> tuple[str, float]:
    """The unit that suits a time, and how many days it is."""
    for unit, size in (("days", 1.0), ("hours", 1 / 24), ("minutes", 1 / 1440)):
        if days >= 2 * size:
            return unit, size
    return "seconds", 1 / 86400


def _print_parts(
    parts: Mapping[str, float], total: float, shown: Callable[[float], str], console: Console
) -> None:
    for name, part in parts.items():
        line = Text(f"  {name:<14}{shown(part)} {100 * part / total:5.1f} %  ")
        line.append("█" * max(1, round(40 * part / total)), _COLOURS.get(name, "blue"))
        console.print(line)
    console.print(f"  {'total':<14}{shown(total)}")


def seconds(value: float) -> str:
    """Seconds in three digits or more."""
    return three(value) if value >= 0.1 else f"{value:.2g}"


def three(value: float) -> str:
    """A number in three digits or more: 0.123, 26.0, 1,234."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def count(number: float) -> str:
    """A number as people read it: 1.01T, 3.15M, 812."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{three(number / size)}{unit}"
    return f"{number:.3g}"
