"""The steps of `parallel3d plan` and of a dry run, from a config to rows of plans."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from parallel3d.base import reader, terminal
from parallel3d.base.errors import ConfigError, UnknownFigure
from parallel3d.base.reader import JsonObject
from parallel3d.config import ResolvedConfig, RunConfig, hardware
from parallel3d.config.hardware import THIS_MACHINE, Hardware
from parallel3d.model.optimizers import kinds
from parallel3d.plan.memory.peak import fullest
from parallel3d.plan.memory.room import gib, room_of, worst
from parallel3d.plan.report import explain_run, plan_table
from parallel3d.plan.report.explain_run import Explanation
from parallel3d.plan.report.from_run import correction_of
from parallel3d.plan.report.plan_table import lines_of, nothing_fits, three
from parallel3d.plan.report.row_json import plan_json
from parallel3d.plan.request import CHOICES, Request, request_of
from parallel3d.plan.search.best_first import Ranking, search
from parallel3d.plan.search.candidates import gathered_longest
from parallel3d.plan.search.plans import Plan
from parallel3d.plan.search.remedy import evaluate
from parallel3d.plan.setting import Setting
from parallel3d.plan.time.step import step_time
from parallel3d.schedule import schedules
from parallel3d.schedule.sharding import Weights

ROWS = 20  # rows shown by default
MOST_DEVICES = 10_000_000  # the search for divisors tries every number up to the square root
FIX = f"fix choices of the planner: {', '.join(CHOICES)}"


def hardware_of(config: RunConfig, name: str | None = None) -> Hardware:
    """Return the hardware called `name`, else the one that the config names, else this machine."""
    if name is not None:
        return hardware.load(name, "--hardware")
    named = config.run.hardware
    return hardware.load(THIS_MACHINE if named == "auto" else named)


def devices_of(config: RunConfig, machine: Hardware) -> int:
    """Return the number of devices in a config's mesh, else of this machine or of one node."""
    if not config.is_planned and isinstance(config.mesh.dp, int):
        return config.mesh.sizes.ranks
    if machine.cores is not None:
        return int(machine.cores.count.value)
    return int(machine.devices_per_node.value) if machine.devices_per_node else 1


def make_request(config: RunConfig, machine: Hardware, devices: int, fix: Sequence[str]) -> Request:
    """Return the request of a config with the choices of `--fix NAME=VALUE ...`.

    Raises ConfigError for a malformed or repeated choice.
    """
    fixed: JsonObject = {}
    for word in fix:
        name, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"--fix {word}: has no value; write NAME=VALUE")
        if name in fixed:
            raise ConfigError(f"--fix {name}: is set twice; set it once")
        fixed[name] = reader.value(text.lower())
    return request_of(config, machine, devices, fixed)


def rank_plans(request: Request, rows: int | None) -> Ranking:
    """Return the rows of a request: `rows`, or 20 that fit and the faster ones that do not."""
    ranking = search(request, rows or ROWS)
    most = None if rows is None else max(0, rows - len(ranking.plans))
    return replace(ranking, too_large=ranking.too_large[:most])


def explain(
    ranking: Ranking, number: int, svg: Path | None, trace: Path | None, out: Console
) -> None:
    """Print row `number` in detail, and draw it to `svg` and `trace` if these are set.

    Raises ConfigError if the table does not have that row.
    """
    from parallel3d.plan.report.timeline import drawing

    rows = ranking.rows
    if not 1 <= number <= len(rows):
        raise ConfigError(f"--explain {number}: must be at most {len(rows)}, the number of rows")
    plan = rows[number - 1]
    plan_table.explain(plan, out)
    if svg or trace:
        picture, events = drawing(plan)
        for path, text in ((svg, picture), (trace, json.dumps(events))):
            if path:
                path.write_text(text, encoding="utf-8")
                terminal.say(out, f"written to {path}")


def to_json(ranking: Ranking, request: Request) -> JsonObject:
    """Return the JSON of `parallel3d plan --json`: rows that fit, then rows that do not.

    Only a model with parameters that some tokens do not use has "num_active_params".
    """
    num_params = request.workload.num_params
    active = request.workload.num_active_params
    return {
        "plans": [plan_json(plan) for plan in ranking.rows],
        "hardware": request.hardware.name,
        "devices": request.devices,
        "global_batch_size": request.global_batch_size,
        "num_params": num_params,
        **({} if active == num_params else {"num_active_params": active}),
        "least": None if ranking.plans else plan_json(ranking.too_large[0]),
    }


def as_written(config: ResolvedConfig, request: Request) -> Plan:
    """Return the plan of a resolved config, without changing any choice."""
    return evaluate(request, replace(Setting.from_config(config), workload=request.workload))


def compare_run(run: Path, machine: Hardware | str | None) -> tuple[Explanation, Plan]:
    """Return what a run measured of its step beside its plan, and that plan.

    - `machine`: the hardware or its name; None takes the config's, then this machine.

    Raises ConfigError for a folder without a run or without parts of a step.
    """
    ranks = explain_run.measured_parts(run)
    config = RunConfig.from_json(str(run / "config.json")).completed()
    if not isinstance(machine, Hardware):
        machine = hardware_of(config, machine)
    plan = as_written(config, request_of(config, machine, config.mesh.sizes.ranks))
    return explain_run.explain_run(plan, ranks), plan


def corrected(machine: Hardware, run: Path, out: Console) -> Hardware:
    """Return the hardware with curves that are corrected by a measured run, and print by what."""
    explained, planned = compare_run(run, machine)
    correction = correction_of(planned, explained)
    terminal.say(out, f"corrected by {run}: {correction.words}")
    return correction.applied(machine)


_HEADER_ENTRY = 130  # approximate bytes of a chunk's entry in the header of a checkpoint file


def choose(config: RunConfig, devices: int, hardware: Hardware) -> tuple[RunConfig, Plan]:
    """Return the config with the best plan's mesh and choices, and that plan.

    The choices in parallel3d.plan.fix stay as they are. Raises ConfigError if nothing fits.
    """
    ranking = search(request_of(config, hardware, devices, fixed_by(config)), rows=1)
    if not ranking.plans:
        raise ConfigError(f'parallel3d.mesh = "plan": {nothing_fits(ranking.too_large[0])}')
    plan = ranking.plans[0]
    return apply(config, plan), plan


def choose_gathers(
    config: ResolvedConfig, hardware: Hardware | None, host_bytes: int | None = None
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the settings of parallel3d.pipeline that "auto" leaves to the planner, and notes.

    They are `weights`, and `gradient_reduction` where that is "auto" and another one than its
    default fits, or is faster. The other parameters are those of `weights_for`.
    """
    once = Setting.from_config(config)
    weights, note = weights_for(once, hardware, host_bytes)
    chosen: dict[str, str] = {"weights": weights}
    notes = [note]
    if not _may_reduce_more_often(config) or (hardware is None and host_bytes is None):
        return chosen, tuple(notes)
    often = replace(once, state=once.state._replace(reduces_once=False))
    weights_often, note_often = weights_for(often, hardware, host_bytes)
    lack, seconds = _lack_and_seconds(once.gathering(weights), hardware, host_bytes)
    lack_often, seconds_often = _lack_and_seconds(
        often.gathering(weights_often), hardware, host_bytes
    )
    if (lack_often, seconds_often) < (lack, seconds):
        why = f"{seconds_often:.3g} s a step are planned, for {seconds:.3g} s with per_step"
        if lack > lack_often:
            why = f"with per_step it lacks {gib(lack)} GiB"
        chosen = {"weights": weights_often, "gradient_reduction": "per_microbatch"}
        notes = [
            note_often,
            f'parallel3d.pipeline.gradient_reduction: "auto" is per_microbatch ({why})',
        ]
    return chosen, tuple(notes)


def _may_reduce_more_often(config: ResolvedConfig) -> bool:
    """Return True if gradients may be reduced after each microbatch, where "auto" would not."""
    pipeline = config.pipeline
    return (
        pipeline.gradient_reduction == "auto"
        and not schedules.splits_backward(pipeline.schedule)
        and not config.train.noise_scale_every
    )


def weights_for(
    setting: Setting, hardware: Hardware | None, host_bytes: int | None = None
) -> tuple[Weights, str]:
    """Return how long weights stay gathered in the fastest plan that fits, and a note on why.

    - `setting`: the run; its own choice for the weights is not read.
    - `hardware`: None if its memory is unknown.
    - `host_bytes`: free host memory of a CPU rank, which is used without `hardware`; the longest
      that fits is taken for the fastest.
    """
    ways = gathered_longest(setting.state.offload_param)
    if hardware is None and host_bytes is None:
        unknown = "the memory of a device is not known"
        return ways[-1], f'parallel3d.pipeline.weights: "auto" is {ways[-1]} ({unknown})'

    def rank(way: Weights) -> tuple[int, float]:
        return _lack_and_seconds(setting.gathering(way), hardware, host_bytes)

    weights = min(ways, key=rank)
    memory = fullest(setting.gathering(weights), hardware)
    # Offloaded states of a CPU rank are in the same memory.
    free_bytes = host_bytes or 0
    room = hardware.memory_bytes.value if hardware else free_bytes - memory.host
    why = f"{gib(memory.total)} of {gib(room)} GiB planned on the fullest device"
    return weights, f'parallel3d.pipeline.weights: "auto" is {weights} ({why})'


def _lack_and_seconds(
    setting: Setting, hardware: Hardware | None, host_bytes: int | None
) -> tuple[int, float]:
    """Return the bytes that a setting lacks, and the planned time of a step; 0 s if not known."""
    if hardware is None:
        memory = fullest(setting)
        free_bytes = host_bytes or 0
        return max(0, memory.total + memory.host - free_bytes), 0.0
    device, host = room_of(hardware)
    memory = worst(setting, hardware)
    lack = max(0, memory.total - device) + max(0, memory.host - host)
    try:
        return lack, step_time(setting, hardware).seconds
    except UnknownFigure:  # such as the FLOP/s of the precision: the longest that fits is taken
        return lack, 0.0


def fixed_by(config: RunConfig) -> JsonObject:
    """Return the choices in parallel3d.plan.fix with their values, by the planner's names."""
    zero = config.zero_optimization
    pipeline = config.pipeline
    values: JsonObject = {
        "zero_stage": zero.stage,
        "offload_optimizer": zero.offload_optimizer.device,
        "offload_param": zero.offload_param.device,
        "weights": pipeline.weights,
        "micro_batch": config.train_micro_batch_size_per_gpu,
        "schedule": pipeline.schedule,
        "stages_per_rank": pipeline.stages_per_rank,
        "recompute": pipeline.activation_checkpointing,
        "gradient_reduction": pipeline.gradient_reduction,
    }
    several = {
        "offload": ("offload_optimizer", "offload_param"),
        "schedule": ("schedule", "stages_per_rank"),
    }
    fixed: JsonObject = {}
    for choice in config.parallel3d.plan.fix:
        for name in several.get(choice, (choice,)):
            fixed[name] = values[name]
    return fixed


def apply(config: RunConfig, plan: Plan) -> RunConfig:
    """Return the config with a plan's choices, and notes that name them."""
    flow, order, state = plan.setting.choices
    mesh = {**flow.mesh._asdict(), "ep": flow.ep, "sequence_parallel": flow.sequence_parallel}
    if state.copies > 1:
        mesh["dp_shards"] = flow.mesh.dp // state.copies
    raw = config.to_dict()
    block = raw["parallel3d"]
    zero = raw["zero_optimization"]
    block |= {"mesh": mesh, "plan": {}}
    block["pipeline"] |= {
        "schedule": order.schedule,
        "stages_per_rank": order.stages_per_rank,
        "activation_checkpointing": str(flow.recompute),
        "gradient_reduction": "per_step" if state.reduces_once else "per_microbatch",
        "weights": state.weights if state.zero_stage == 3 else config.pipeline.weights,
    }
    zero["stage"] = state.zero_stage
    zero["offload_optimizer"]["device"] = state.offload_optimizer
    zero["offload_param"]["device"] = state.offload_param
    num_samples = flow.micro_batch * flow.mesh.dp
    raw["train_micro_batch_size_per_gpu"] = flow.micro_batch
    raw["gradient_accumulation_steps"] = raw["train_batch_size"] // num_samples
    machine = plan.request.hardware
    return RunConfig.from_dict(raw).with_notes(
        *config.notes,
        f'parallel3d.mesh: "plan" for {plan.request.devices} x {machine.name}:',
        *(f"  {line}" for line in lines_of(plan.setting)),
        f"  predicted {three(plan.time.seconds)} s a step, {gib(plan.memory.total)} of "
        f"{gib(machine.memory_bytes.value)} GiB on the fullest device",
    )


def checkpoint_bytes(setting: Setting) -> int:
    """Return the approximate bytes of a checkpoint: fp32 weights, optimizer state, file headers."""
    work = setting.workload
    file = work.optimizer.type
    mesh = setting.mesh
    total = 0
    for layer in work.layers:
        for spec in layer.own_params:
            total += work.state_bytes(spec.role) * spec.numel
            total += len(kinds(file, spec.role, work.has_ema)) * _HEADER_ENTRY * mesh.tp
    return total + len(kinds(file, has_ema=work.has_ema)) * _HEADER_ENTRY * mesh.ranks
