"""The planner's two tables on a terminal, and the details of one row."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from parallel3d.base import terminal
from parallel3d.base.mesh_sizes import AXES, WITHOUT_CP
from parallel3d.base.terminal import Cell, Column
from parallel3d.config.hardware import Hardware
from parallel3d.model.recompute import NONE
from parallel3d.model.spec import LayerSpec, count_params
from parallel3d.models.common import head_size_of
from parallel3d.plan.memory.peak import PARTS, Memory, nccl_estimate, peak_of
from parallel3d.plan.memory.room import gib
from parallel3d.plan.request import Request
from parallel3d.plan.search.best_first import Ranking
from parallel3d.plan.search.plans import Plan
from parallel3d.plan.setting import BYTES, Setting
from parallel3d.plan.time.operators import OFF_TILES, TILE_BYTES, curves_for, fits_tiles, machine_of
from parallel3d.plan.time.sharding import slowest_matrix_work
from parallel3d.plan.time.step import TIMES
from parallel3d.plan.time.traffic import shard_traffic
from parallel3d.plan.vocabulary import VOCABULARY

Row = dict[Column, Cell]  # the cell of each column


def show(ranking: Ranking, request: Request, out: Console) -> None:
    """Print plans that fit, faster plans that do not, and the former by parts.

    Each plan that does not fit is followed by the reason and the smallest change that makes it fit.
    If no plan fits, print how to make one fit.
    """
    say_heading(request, out)
    if ranking.plans:
        _show(ranking.plans, 1, request, out)
    if ranking.too_large:
        out.print(Text("\nfaster, but too large" if ranking.plans else "\ntoo large", "bold"))
        _show(ranking.too_large, len(ranking.plans) + 1, request, out)
        for number, plan in enumerate(ranking.too_large, len(ranking.plans) + 1):
            terminal.say(out, f"{number:>2}  {plan.reason}", "    ")
            terminal.say(out, f"    smallest change: {plan.remedy}", "    ")
    if ranking.plans:
        _show_parts(ranking.plans, request, out)
        terminal.say(
            out,
            Text(
                '\n--explain N shows row N; "mesh": "plan" in a config uses row 1',
                "dim",
            ),
        )
    else:
        terminal.say(out, nothing_fits(ranking.too_large[0]))


def nothing_fits(least: Plan) -> str:
    """Return the message for a request without a plan that fits.

    `least` is the plan that needs the least memory.
    """
    request = least.request
    flow, _, state = least.setting.choices
    fixed = f"fewer fixed choices (now {', '.join(request.fixed)}), " if request.fixed else ""
    no_host = ""
    if request.hardware.host is None:
        no_host = (
            '. Offload was not searched, because the hardware file has no "host" (memory_bytes, '
            "device_bandwidth, adam_params): add it"
        )
    return (
        f"NOTHING FITS on {request.devices:,} x {request.hardware.name}: the smallest plan needs "
        f"{gib(least.memory.total)} GiB, with {flow.mesh.label}, ZeRO-{state.zero_stage}, micro "
        f"batch {flow.micro_batch}, recompute {flow.recompute}, offload: {state.offload} "
        f"({least.reason}); use {fixed}more devices, or devices and hosts with more memory{no_host}"
    )


def parameters(layers: Sequence[LayerSpec]) -> str:
    """Return "1.5B parameters"; and how many are active, if a token does not use all."""
    total = count_params(layers)
    active = count_params(layers, active=True)
    return f"{count(total)} parameters" + (f" ({count(active)} active)" if active < total else "")


def say_heading(request: Request, out: Console) -> None:
    """Print the request: model, precision, devices, tokens of a step, and fixed choices."""
    config = request.config
    hardware = request.hardware
    seq = request.workload.seq
    batch = request.global_batch_size
    tokens = "" if request.num_tokens is None else f", {count(request.num_tokens)} tokens in all"
    terminal.say(
        out,
        f"{config.model.family} of {parameters(request.workload.layers)} in "
        f"{request.workload.precision} on {request.devices:,} x {hardware.name}; a step of "
        f"{batch:,} x {seq:,} = {count(batch * seq)} tokens{tokens}",
    )
    for note in config.notes:
        if note.startswith(VOCABULARY):
            terminal.say(out, note)
    if request.batch_sizes:
        terminal.say(out, "memory and time of a step are those of the largest batch")
    _say_off_tiles(request, out)
    if request.fixed:
        terminal.say(
            out, "fixed: " + ", ".join(f"{name} = {v}" for name, v in request.fixed.items())
        )


def _say_off_tiles(request: Request, out: Console) -> None:
    """Name sizes of the model that slow its products down on this device."""
    model = request.config.model
    precision = request.workload.precision
    sizes = {"head size": head_size_of(model), "hidden_size": model.hidden_size}
    for name in ("intermediate_size", "moe_intermediate_size", "vocab_size"):
        if isinstance(size := getattr(model, name, None), int):
            sizes[name] = size
    for name, size in sizes.items():
        if not fits_tiles(size, precision, request.hardware):
            step = TILE_BYTES // BYTES[precision]
            nearest = -(-size // step) * step
            terminal.say(
                out,
                f"the model's {name} = {size} is not a multiple of {step}, as tensor cores need: "
                f"its products take {1 / OFF_TILES:.2f} times as long; use {nearest}",
            )


def _show(plans: tuple[Plan, ...], first: int, request: Request, out: Console) -> None:
    # On a narrow terminal a row takes two lines: the plan's mesh, memory and speed come first.
    room = request.hardware.memory_bytes.value
    axes = AXES if any(plan.setting.mesh.cp > 1 for plan in plans) else WITHOUT_CP
    any_gathers = any(plan.setting.state.zero_stage == 3 for plan in plans)
    any_offloads = any(plan.setting.state.num_offloads for plan in plans)
    rows = []
    for number, plan in enumerate(plans, first):
        flow, (stages_per_rank, schedule), state = plan.setting.choices
        mesh = "×".join(str(getattr(flow.mesh, axis)) for axis in axes)
        if flow.ep > 1:
            mesh += f" ep {flow.ep}"
        if state.copies > 1:
            mesh += f" shards {flow.mesh.dp // state.copies}"
        if flow.sequence_parallel:
            mesh += " sp"
        each = "" if state.reduces_once or state.zero_stage == 2 else " each"
        row: Row = {
            Column("#"): str(number),
            Column("×".join(axes), right=False): mesh,
            Column("ZeRO", right=False, line=1): f"{state.zero_stage}{each}",
        }
        if any_gathers:
            weights = state.weights.removeprefix("per_") if state.zero_stage == 3 else "–"
            row[Column("weights", right=False, line=1)] = weights
        if any_offloads:
            row[Column("offload", right=False, line=1)] = state.offload
        several = f" ×{stages_per_rank}" if stages_per_rank > 1 else ""
        rate = plan.per_device(request.flops.full)
        mfu = plan.mfu(request.flops.full)
        row |= {
            Column("micro×M", line=1): f"{flow.micro_batch}×{plan.setting.num_microbatches}",
            Column("schedule", right=False, line=1): schedule + several,
            Column("recompute", right=False, line=1): (
                "–" if flow.recompute == NONE else str(flow.recompute)
            ),
            Column("GiB"): gib(plan.memory.total),
            Column("of device"): f"{100 * plan.memory.total / room:.0f} %",
            Column("s/step"): three(plan.time.seconds),
            Column("bubble", line=1): f"{100 * plan.time.bubble:.1f} %",
            Column("tokens/s"): count(plan.tokens_per_second),
            Column("TFLOP/s"): f"{rate / 1e12:.{0 if rate >= 1e13 else 2}f}",
            Column("MFU"): "–" if mfu is None else f"{100 * mfu:.0f} %",
        }
        if plan.days is not None:
            row[Column("days")] = three(plan.days)
        rows.append(row)
    _print_rows(rows, "bold" if first == 1 else "", out)


def _print_rows(rows: Sequence[Row], first: str, out: Console) -> None:
    terminal.show(out, [*rows[0]], [[*row.values()] for row in rows], first=first)


def explain(plan: Plan, out: Console) -> None:
    """Print a plan's memory and time by parts, FLOP/s by each convention, and its duration."""
    request = plan.request
    flops = plan.request.flops
    total = plan.time.seconds
    say_heading(request, out)
    for line in lines_of(plan.setting):
        terminal.say(out, line, " " * 10)
    show_memory(plan.memory, plan.setting, request.hardware, out)
    out.print(Text("\nstep of the busiest pp rank", "bold"))
    parts = {name: part for name, part in plan.time.parts.items() if part > 1e-6 * total}
    parts = {"waiting" if name == "bubble" else name: part for name, part in parts.items()}
    _print_parts(parts, total, lambda part: f"{three(part):>8} s  ", out)
    if plan.setting.mesh.pp > 1:
        share = f"{100 * plan.time.bubble:.1f} %"
        terminal.say(out, f"\nbubble: pp ranks idle for {share} of the time of their passes")
    if plan.setting.workload.newton_schulz is not None:
        terminal.say(out, _on_matrices(plan.setting, request.hardware))
    terminal.say(
        out,
        f"\n{count(plan.tokens_per_second)} tokens/s; TFLOP/s of a device: "
        f"{plan.per_device(flops.full) / 1e12:.4g} without recomputation, "
        f"{plan.per_device(flops.full + plan.recomputed_flops) / 1e12:.4g} with it",
    )
    full = plan.mfu(flops.full)
    causal = plan.mfu(flops.causal)
    if full is not None and causal is not None:
        conventions = f"{100 * full:.1f} % counting full attention, {100 * causal:.1f} % counting"
        terminal.say(out, f"MFU {conventions} its causal half")
    if plan.days is not None and plan.device_hours is not None:
        duration = f"{three(plan.days)} days, {three(plan.device_hours)} device-hours"
        terminal.say(out, f"{count(request.num_tokens or 0)} tokens take {duration}")
    if not plan.fits:
        problem = f"\ndoes not fit: {plan.reason}\nsmallest change: {plan.remedy}"
        terminal.say(out, Text(problem, "red"))


def _on_matrices(setting: Setting, hardware: Hardware) -> str:
    """Return a line about the exchange and the work of an optimizer of whole matrices."""
    machine = machine_of(hardware, setting.workload.software, curves_for(hardware))
    work = slowest_matrix_work(setting, machine)
    optimizer = setting.workload.optimizer.type
    return (
        f"\n{optimizer}: a stage's ranks exchange {work.sent_bytes / 1e9:.3g} GB in "
        f"{three(work.exchange_seconds)} s a step; Newton-Schulz takes "
        f"{three(work.product_seconds)} s, and the busiest rank has {work.imbalance:.3g} "
        "times the mean work"
    )


def show_memory(memory: Memory, setting: Setting, hardware: Hardware | None, out: Console) -> None:
    """Print the memory of the fullest rank by parts, and the settings behind large buffers."""
    parts = {name: size for name, size in memory.parts.items() if size}
    out.print(Text(f"\nmemory of pp rank {memory.pp_coord} (the fullest)", "bold"))
    _print_parts(parts, memory.total, lambda size: f"{gib(size):>8} GiB", out)
    for name, size in (("host", memory.host), ("nvme", memory.nvme)):
        if size:
            out.print(f"  {name:<14}{gib(size):>8} GiB per device")
    if estimate := nccl_estimate(setting, memory.pp_coord, hardware):
        remark = "of the margin: NCCL, an estimate that no GPU has measured yet"
        terminal.say(out, f"  {gib(estimate)} GiB {remark}", "    ")
    for remark in on_buffers(setting, memory, hardware):
        terminal.say(out, f"  {remark}", "    ")


def _print_parts(
    parts: Mapping[str, float], total: float, shown: Callable[[float], str], out: Console
) -> None:
    for name, part in parts.items():
        line = Text(f"  {name:<14}{shown(part)} {100 * part / total:5.1f} %  ")
        line.append("█" * max(1, round(40 * part / total)), "blue")
        out.print(line)
    out.print(f"  {'total':<14}{shown(total)}")


def lines_of(setting: Setting) -> Iterator[str]:
    """Yield lines that describe a setting's choices, with the values of the config."""
    flow, (stages_per_rank, schedule), state = setting.choices
    split = ", sequence parallel" if flow.sequence_parallel else ""
    split += f", experts divided over {flow.ep} dp ranks" if flow.ep > 1 else ""
    several = f" with {stages_per_rank} stages a rank" if stages_per_rank > 1 else ""
    reduced = "once a step" if state.reduces_once else "after each microbatch"
    yield f"mesh      {flow.mesh.label}{split}"
    yield (
        f"pipeline  {schedule}{several}, {setting.num_microbatches} microbatches of "
        f"{flow.micro_batch}, recompute {flow.recompute}"
    )
    if state.zero_stage == 3:
        reduced += f", weights gathered {state.weights}"
    reduced += f", offload: {state.offload}"
    yield f"state     ZeRO-{state.zero_stage}, gradients reduced {reduced}"
    if state.copies > 1:
        moved = shard_traffic(setting)
        gathered, reduced, summed = (three(size / 1e9) for size in moved)
        yield (
            f"copies    {state.copies} of {setting.shards} shards (dp_shards "
            f"{flow.mesh.dp // state.copies}); a rank's GB in a step: {gathered} gathered and "
            f"{reduced} reduced inside a copy, {summed} summed over the copies"
        )


def three(value: float) -> str:
    """Return a number as text with three digits or more: 0.123, 26.0, 1,234."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def count(number: float) -> str:
    """Return a number as text with a suffix for its magnitude: 1.01T, 3.15M, 812."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{three(number / size)}{unit}"
    return f"{number:.3g}"


LARGE = 0.05
"""The smallest share of a rank's device memory for which a buffer is mentioned."""
_SIZES = (
    "reduce_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "sub_group_size",
)


def on_buffers(setting: Setting, memory: Memory, hardware: Hardware | None) -> Iterator[str]:
    """Yield a line for each DeepSpeed buffer size that costs at least LARGE of the rank's memory.

    The alternative is a buffer of the largest layer's size: no more is reduced or gathered at once.
    """
    layer = largest_layer(setting)
    buffers = setting.workload.buffers
    for name in _SIZES:
        lower = buffers.model_copy(update={name: layer})
        leaner = replace(setting, workload=replace(setting.workload, buffers=lower))
        saved = memory.total - peak_of(leaner, memory.pp_coord, hardware).total
        if saved >= LARGE * memory.total:
            yield (
                f"{gib(saved)} GiB: DeepSpeed's {name} = {getattr(buffers, name):,} "
                f"elements; lower it to the size of the largest layer: --zero_optimization.{name} "
                f"{layer}"
            )


def largest_layer(setting: Setting) -> int:
    """Return the parameters of the largest layer on a tp rank, rounded up to two digits."""
    exact = max(
        sum(p.elements({"tensor": setting.mesh.tp}) for p in layer.params)
        for layer in setting.workload.layers
    )
    unit: int = 10 ** max(0, len(str(exact)) - 2)
    return -(-exact // unit) * unit


_SHORT = {
    "gathered": "gath.",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ.",
    "compute": "comp.",
    "bubble": "waits",
    "pipeline": "pipe",
    "offload": "offl.",
}


def _show_parts(plans: tuple[Plan, ...], request: Request, out: Console) -> None:
    """Print the memory of the fullest rank and the seconds of the busiest rank by parts.

    Parts that no plan has are omitted. TFLOP/s count recomputation; MFU counts the causal half of
    the attention.
    """
    parts = [part for part in PARTS if any(plan.memory.parts.get(part) for plan in plans)]
    times = [part for part in TIMES if any(_shown(plan, part) != "–" for plan in plans)]
    flops = request.flops
    rows = []
    for number, plan in enumerate(plans, 1):
        row: Row = {Column("#"): str(number)}
        for part in parts:
            size = plan.memory.parts.get(part)
            row[Column(_SHORT.get(part, part))] = gib(size) if size else "–"
        row[Column("│", line=1)] = "│"
        for part in times:
            row[Column(_SHORT.get(part, part), line=1)] = _shown(plan, part)
        row[Column("│", line=2)] = "│"
        rate = plan.per_device(flops.full + plan.recomputed_flops)
        row[Column("TF/s hw", line=2)] = three(rate / 1e12)
        if (mfu := plan.mfu(flops.causal)) is not None:
            row[Column("MFU causal", line=2)] = f"{100 * mfu:.0f} %"
        if plan.device_hours is not None:
            row[Column("dev-hours", line=2)] = three(plan.device_hours)
        rows.append(row)
    title = "by parts: GiB, fullest rank │ seconds, busiest rank │ with recomputation"
    out.print(Text(f"\n{title}", "bold"))
    _print_rows(rows, "bold", out)


def _shown(plan: Plan, part: str) -> str:
    share = plan.time.parts[part]
    return three(share) if share > 1e-3 * plan.time.seconds else "–"
