"""The dry run: what the planner predicts for a run, without training."""

from pathlib import Path

from rich.console import Console
from rich.filesize import decimal

from parallel3d.base import terminal
from parallel3d.base.arguments import DONE, FAILED
from parallel3d.base.errors import UnknownFigure
from parallel3d.base.reader import JsonObject
from parallel3d.checkpoint import free_space
from parallel3d.config import RunConfig
from parallel3d.config.hardware import Hardware
from parallel3d.mesh.device import pick_device
from parallel3d.mesh.launch import Launch
from parallel3d.plan.impossible import refuse_impossible
from parallel3d.plan.memory.peak import Memory, fullest
from parallel3d.plan.memory.room import reason_of, worst
from parallel3d.plan.report import plan_rows, plan_table
from parallel3d.plan.report.plan_rows import checkpoint_bytes, choose, choose_gathers
from parallel3d.plan.report.row_json import choices_json, plan_json
from parallel3d.plan.request import request_of
from parallel3d.plan.search.plans import Plan
from parallel3d.plan.setting import Setting, leaves_weights_open
from parallel3d.plan.vocabulary import with_vocabulary
from parallel3d.train.inputs import missing_inputs
from parallel3d.train.known_hardware import described_hardware, machine_of

_NO_HARDWARE = (
    "measure this machine with `parallel3d plan --calibrate`, or name its hardware with "
    "--parallel3d.run.hardware"
)


def dry_run(config: RunConfig, launch: Launch, *, devices: int, as_json: bool) -> int:
    """Print mesh, memory, checkpoint size and, if the hardware is known, time; on rank 0.

    `devices` is the number of devices; 0 takes those of the config's mesh, else those launched.
    Returns the exit code: 1 if the run does not fit into memory.
    """
    mesh = None if config.is_planned else config.mesh
    own = mesh.sizes.ranks if mesh and mesh.dp != "auto" else launch.world_size
    devices = devices or own
    refuse_impossible(config, devices)
    plan: Plan | None = None
    known: Hardware | None = None
    why_no_time = _NO_HARDWARE
    if config.is_planned:
        config, plan = choose(config, devices, machine_of(config, launch))
        setting = plan.setting
        known = plan.request.hardware
    else:
        resolved = with_vocabulary(config, may_guess=True).resolve(devices)
        device = pick_device(launch)
        known = described_hardware(config, device)
        if leaves_weights_open(config):
            host_bytes = free_space.free_memory(devices) if device.type == "cpu" else None
            resolved = resolved.with_gathers(*choose_gathers(resolved, known, host_bytes))
        setting = Setting.from_config(resolved)
        if known:
            try:
                plan = plan_rows.as_written(resolved, request_of(resolved, known, devices))
            except UnknownFigure as error:  # a run does not need it
                why_no_time = str(error)
        config = resolved
    if plan:
        memory = plan.memory
        fits = plan.fits
    else:
        memory = worst(setting, known) if known else fullest(setting)
        fits = known is None or not reason_of(memory, known)
    if launch.rank == 0:
        out = terminal.console(as_json)
        for note in config.notes:
            terminal.say(out, note, "  ")
        for reason in missing_inputs(config):
            terminal.say(out, f"a run on this machine would stop: {reason}", "  ")
        if plan:
            plan_table.explain(plan, out)
            row = plan_json(plan)
        else:
            row = _show_memory(setting, memory, known, out)
            terminal.say(out, f"\nThe time of a step is unknown: {why_no_time}")
        size = _show_checkpoint(config, setting, out)
        out.print("dry run: nothing was trained")
        if as_json:
            report = {
                "dry_run": True,
                "plan": row,
                "checkpoint_bytes": size,
                "hardware": known.name if known else None,
                "config": config.to_public_dict(),
            }
            terminal.print_json(report)
    return DONE if fits else FAILED


def _show_memory(
    setting: Setting, memory: Memory, hardware: Hardware | None, out: Console
) -> JsonObject:
    """Print a run's choices and memory; return them for `--json`."""
    for line in plan_table.lines_of(setting):
        terminal.say(out, line, " " * 10)
    plan_table.show_memory(memory, setting, hardware, out)
    if hardware and (reason := reason_of(memory, hardware)):
        terminal.say(out, f"\nThis does not fit: {reason}")
    return choices_json(setting, memory)


def _show_checkpoint(config: RunConfig, setting: Setting, out: Console) -> int:
    """Print the size of a checkpoint, and return its bytes."""
    size = checkpoint_bytes(setting)
    folder = Path(config.run.directory)
    lacks = free_space.missing_disk_bytes(folder, size)
    missing = f"; {folder.absolute()} lacks {decimal(lacks)} for one" if lacks else ""
    terminal.say(out, f"a checkpoint is about {decimal(size)}{missing}")
    return size
