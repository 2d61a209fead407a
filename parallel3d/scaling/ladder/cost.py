"""Cost of each run of a ladder by the planner: mesh, memory and hours."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig, hardware
from parallel3d.config.hardware import THIS_MACHINE, Hardware
from parallel3d.plan.impossible import refuse_impossible
from parallel3d.plan.memory.peak import fullest
from parallel3d.plan.report import command
from parallel3d.plan.report.choose import choose
from parallel3d.plan.search.plans import request_of
from parallel3d.plan.setting import Setting
from parallel3d.scaling.ladder.expand import LadderRun


@dataclass(frozen=True)
class Cost:
    """The cost of a run: bytes of its fullest device, and hours of all its devices at once.

    `hours` is None where nothing is known of the hardware; evaluation and start are not in them.
    """

    mesh: str
    memory_bytes: int
    hours: float | None


def with_costs(runs: Sequence[LadderRun]) -> list[tuple[LadderRun, Cost]]:
    """The runs with their costs, each mesh chosen where it is "plan".

    Raises ConfigError where a run does not fit, or nothing is known of the hardware to plan for.
    """
    planned: dict[str, tuple[RunConfig, float | None, int]] = {}
    found, bad = [], []
    for run in runs:
        config = run.config
        key = f"{config.model} {config.train_batch_size} {run.devices} {config.parallel3d.mesh}"
        try:
            if key not in planned:
                planned[key] = _planned(run.config, run.devices)
            config, seconds, memory = planned[key]
        except ConfigError as error:
            bad.append(f"{run.name}: {error}")
            continue
        if run.config.is_planned:
            run = replace(run, config=_placed(run.config, config))
        own_steps = run.steps * run.own_share
        hours = None if seconds is None else own_steps * seconds / 3600
        mesh = config.mesh
        found.append((run, Cost(f"{mesh.pp}x{mesh.dp}x{mesh.tp}", memory, hours)))
    if bad:
        more = f"; and {len(bad) - 1} more runs" if len(bad) > 1 else ""
        raise ConfigError(f"the ladder has runs that cannot be: {bad[0]}{more}")
    return found


def _planned(config: RunConfig, devices: int) -> tuple[RunConfig, float | None, int]:
    """The config as it will run, seconds of a step, and bytes of the fullest device."""
    machine = _hardware(config)
    if config.is_planned:
        config, plan = choose(config, devices, machine or hardware.load(THIS_MACHINE))
        return config.resolve(devices), plan.time.seconds, plan.memory.total
    config = config.resolve(devices)
    refuse_impossible(config, devices)
    if machine is None:
        return config, None, fullest(Setting.from_config(config)).total
    plan = command.as_written(config, request_of(config, machine, devices))
    if not plan.fits:
        remedy = plan.remedy or 'a larger mesh, or "mesh": "plan" with more devices'
        raise ConfigError(f"does not fit on {devices} x {machine.name}: {plan.reason}; {remedy}")
    return config, plan.time.seconds, plan.memory.total


def _hardware(config: RunConfig) -> Hardware | None:
    """What the config names, else this machine if it is measured."""
    if config.run.hardware != "auto":
        return hardware.load(config.run.hardware)
    return hardware.load(THIS_MACHINE) if THIS_MACHINE in hardware.names() else None


def _placed(config: RunConfig, planned: RunConfig) -> RunConfig:
    """`config` with the choices of `planned`, which is another run of the same size."""
    raw, chosen = config.to_dict(), planned.to_dict()
    for key in ("zero_optimization", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):  # fmt: skip # noqa: E501
        raw[key] = chosen[key]
    for key in ("mesh", "plan", "pipeline"):
        raw["parallel3d"][key] = chosen["parallel3d"][key]
    return RunConfig.from_dict(raw)
