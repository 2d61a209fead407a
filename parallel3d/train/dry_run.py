"""The dry run: what the planner predicts for a run, without training."""

import json
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal

from parallel3d.base import terminal
from parallel3d.base.arguments import DONE, FAILED
from parallel3d.checkpoint import free_space
from parallel3d.config import RunConfig
from parallel3d.mesh.device import pick_device
from parallel3d.mesh.launch import Launch
from parallel3d.plan.impossible import refuse_impossible
from parallel3d.plan.memory.peak import fullest
from parallel3d.plan.report import plan_rows, plan_table
from parallel3d.plan.report.plan_rows import checkpoint_bytes, choose, choose_gathers
from parallel3d.plan.report.row_json import choices_json, plan_json
from parallel3d.plan.request import request_of
from parallel3d.plan.search.plans import Plan
from parallel3d.plan.setting import Setting, leaves_weights_open
from parallel3d.plan.vocabulary import with_vocabulary
from parallel3d.train.inputs import missing_inputs
from parallel3d.train.known_hardware import described_hardware, machine_of


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
    if config.is_planned:
        config, plan = choose(config, devices, machine_of(config, launch))
        setting = plan.setting
    else:
        resolved = with_vocabulary(config, may_guess=True).resolve(devices)
        device = pick_device(launch)
        known = described_hardware(config, device)
        if leaves_weights_open(config):
            host_bytes = free_space.free_memory(devices) if device.type == "cpu" else None
            resolved = resolved.with_gathers(*choose_gathers(resolved, known, host_bytes))
        setting = Setting.from_config(resolved)
        if known:
            plan = plan_rows.as_written(resolved, request_of(resolved, known, devices))
        config = resolved
    if launch.rank == 0:
        out = terminal.console(as_json)
        for note in config.notes:
            terminal.say(out, note, "  ")
        for reason in missing_inputs(config):
            terminal.say(out, f"a run on this machine would stop: {reason}", "  ")
        report = _show(config, plan, setting, out)
        if as_json:
            print(json.dumps(report))
    return FAILED if plan and not plan.fits else DONE


def _show(
    config: RunConfig, plan: Plan | None, setting: Setting, out: Console
) -> dict[str, object]:
    """Print the dry run; return the object for `--json`."""
    if plan:
        plan_table.explain(plan, out)
        row = plan_json(plan)
    else:
        memory = fullest(setting)
        for line in plan_table.lines_of(setting):
            terminal.say(out, line, " " * 10)
        plan_table.show_memory(memory, setting, None, out)
        terminal.say(
            out,
            "\nThe time of a step is unknown: measure this machine with `parallel3d plan "
            "--calibrate`, or name its hardware with --parallel3d.run.hardware",
        )
        row = choices_json(setting, memory)
    size = checkpoint_bytes(setting)
    folder = Path(config.run.directory)
    lacks = free_space.missing_disk_bytes(folder, size)
    missing = f"; {folder.absolute()} lacks {decimal(lacks)} for one" if lacks else ""
    terminal.say(out, f"a checkpoint is about {decimal(size)}{missing}")
    out.print("dry run: nothing was trained")
    return {
        "dry_run": True,
        "plan": row,
        "checkpoint_bytes": size,
        "hardware": plan.request.hardware.name if plan else None,
        "config": config.to_public_dict(),
    }
