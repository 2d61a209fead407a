"""Write the planner's choices into a config. Pure functions: every rank gets the same config."""

from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from parallel3d.config.hardware import Cores, Figure, Hardware, Host
from parallel3d.model.optimizers import kinds, state_bytes
from parallel3d.plan.memory.peak import per_rank
from parallel3d.plan.report.plan_rows import nothing_fits
from parallel3d.plan.report.plan_table import lines_of, seconds
from parallel3d.plan.search.best_first import search
from parallel3d.plan.search.plans import Plan, request_of
from parallel3d.plan.search.remedy import choose_weights, gib
from parallel3d.plan.setting import Setting
from parallel3d.schedule.sharding import Weights

_HEADER_ENTRY = 130  # approximate bytes of a chunk's entry in the header of a checkpoint file


def choose(config: RunConfig, devices: int, hardware: Hardware) -> tuple[RunConfig, Plan]:
    """Return the config with the best plan's mesh and choices, and that plan.

    The choices in parallel3d.plan.fix stay as they are. Raises ConfigError if nothing fits.
    """
    request = request_of(config, hardware, devices, fixed_by(config))
    ranking = search(request, rows=1)
    if not ranking.plans:
        assert ranking.least is not None
        raise ConfigError(f'parallel3d.mesh = "plan": {nothing_fits(ranking.least)}')
    plan = ranking.plans[0]
    return apply(config, plan), plan


def weights_for(
    setting: Setting, hardware: Hardware | None, host_bytes: int | None = None
) -> tuple[Weights, str]:
    """Return how long a setting's weights stay gathered, and a note that says why.

    Args:
        setting: the run; what it says of weights is not read.
        hardware: None if its memory is unknown.
        host_bytes: free host memory of a CPU rank, which is used without `hardware`.
    """
    weights: Weights = "per_microbatch"
    why = "the memory of a device is not known"
    if hardware is None and host_bytes is not None:
        hardware = _cpu_rank(setting, host_bytes)
    if hardware is not None:
        weights, memory = choose_weights(setting, hardware)
        room = gib(hardware.memory_bytes.value)
        why = f"{gib(memory.total)} of {room} GiB planned on the fullest device"
    return weights, f'parallel3d.pipeline.weights: "auto" is {weights} ({why})'


def _cpu_rank(setting: Setting, host_bytes: int) -> Hardware:
    """Return a CPU rank as hardware: its share of host memory, part of it for offloaded states."""
    offloaded = max(memory.host for memory in per_rank(setting))
    device, host, unused = (
        Figure(value=float(number), source="this host")
        for number in (host_bytes - offloaded, offloaded, 1)
    )
    return Hardware(
        name="cpu", device_names=(), peak_flops={}, memory_bytes=device,
        host=Host(memory_bytes=host, device_bandwidth=unused, adam_params=unused),
        cores=Cores(count=unused, alone={}),
    )  # fmt: skip


def fixed_by(config: RunConfig) -> dict[str, object]:
    """Return the choices in parallel3d.plan.fix with their values, by the planner's names."""
    zero, pipeline = config.zero_optimization, config.pipeline
    values: dict[str, object] = {
        "zero_stage": zero.stage, "offload_optimizer": zero.offload_optimizer.device,
        "offload_param": zero.offload_param.device, "weights": pipeline.weights,
        "micro_batch": config.train_micro_batch_size_per_gpu, "schedule": pipeline.schedule,
        "stages_per_rank": pipeline.stages_per_rank, "recompute": pipeline.activation_checkpointing,
        "gradient_reduction": pipeline.gradient_reduction,
    }  # fmt: skip
    several = {
        "offload": ("offload_optimizer", "offload_param"),
        "schedule": ("schedule", "stages_per_rank"),
    }
    fixed = config.parallel3d.plan.fix
    return {name: values[name] for choice in fixed for name in several.get(choice, (choice,))}


def apply(config: RunConfig, plan: Plan) -> RunConfig:
    """Return the config with a plan's choices, and notes that name them."""
    s = plan.setting
    mesh = {**s.mesh._asdict(), "ep": s.ep, "sequence_parallel": s.sequence_parallel}
    raw = config.to_dict()
    block, zero = raw["parallel3d"], raw["zero_optimization"]
    block |= {"mesh": mesh, "plan": {}}
    block["pipeline"] |= {
        "schedule": s.schedule,
        "stages_per_rank": s.stages_per_rank,
        "activation_checkpointing": s.recompute,
        "gradient_reduction": "per_step" if s.reduces_once else "per_microbatch",
        "weights": s.weights if s.zero_stage == 3 else config.pipeline.weights,
    }
    zero["stage"] = s.zero_stage
    zero["offload_optimizer"]["device"] = s.offload_optimizer
    zero["offload_param"]["device"] = s.offload_param
    raw["train_micro_batch_size_per_gpu"] = s.shape.batch
    raw["gradient_accumulation_steps"] = raw["train_batch_size"] // s.shape.batch // s.dp
    machine = plan.request.hardware
    return RunConfig.from_dict(raw).with_notes(
        *config.notes,
        f'parallel3d.mesh: "plan" for {plan.request.devices} x {machine.name}:',
        *(f"  {line}" for line in lines_of(s)),
        f"  predicted {seconds(plan.time.seconds)} s a step, {gib(plan.memory.total)} of "
        f"{gib(machine.memory_bytes.value)} GiB on the fullest device",
    )


def checkpoint_bytes(setting: Setting) -> int:
    """Return the approximate bytes of a checkpoint: fp32 weights, optimizer state, file headers."""
    s, total = setting, 0
    for spec in (spec for layer in s.layers for spec in layer.own_params):
        total += state_bytes(s.optimizer, spec.role) * spec.numel
        total += len(kinds(s.optimizer, spec.role)) * _HEADER_ENTRY * s.tp
    return total + len(kinds(s.optimizer)) * _HEADER_ENTRY * s.devices
