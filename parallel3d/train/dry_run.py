"""The planner applied to a run: the mesh that a config leaves open, and the dry run."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal

from parallel3d.base import terminal
from parallel3d.base.errors import ConfigError
from parallel3d.checkpoint import room
from parallel3d.config import RunConfig, hardware
from parallel3d.mesh.device import pick_device
from parallel3d.mesh.launch import Launch
from parallel3d.plan.impossible import refuse_impossible
from parallel3d.plan.memory.peak import fullest
from parallel3d.plan.report import command, plan_table
from parallel3d.plan.report.choose import checkpoint_bytes, choose, weights_for
from parallel3d.plan.search.plans import Plan, choices_json, request_of, with_vocabulary
from parallel3d.plan.setting import Setting, leaves_weights_open, with_weights
from parallel3d.train.known_hardware import described, machine_of

DONE, FAILED = 0, 1  # exit codes of a dry run; 1: it does not fit, or layers do not match


def dry_run(config: RunConfig, launch: Launch, *, devices: int, as_json: bool) -> int:
    """Print what a run would be, and train nothing: mesh, memory, time, checkpoint.

    `devices`: for how many; 0 for those of the config's mesh, or those launched. Rank 0 speaks.
    Where nothing is known of the machine there is no time. Gives the exit code: 1 where it does
    not fit, and on rank 0 where its layers do not match on tp ranks.
    """
    mesh = None if config.is_planned else config.mesh
    own = mesh.pp * mesh.dp * mesh.tp if mesh and isinstance(mesh.dp, int) else launch.world_size
    devices = devices or own
    refuse_impossible(config, devices)
    plan: Plan | None = None
    if config.is_planned:
        config, plan = choose(config, devices, machine_of(config, launch))
    else:
        config = with_vocabulary(config).resolve(devices)
        refuse_impossible(config, devices)
        if leaves_weights_open(config):
            known = described(config, pick_device(launch))
            config = with_weights(config, *weights_for(config, known))
        with _unless_unmeasured(config):
            machine = machine_of(config, launch)
            plan = command.as_written(config, request_of(config, machine, devices))
    if launch.rank == 0:
        out = terminal.console(as_json)
        for note in config.notes:
            terminal.say(out, note, "  ")
        report = _show(config, plan, out)
        if as_json:
            print(json.dumps(report))
    return FAILED if plan and not plan.fits else DONE


@contextmanager
def _unless_unmeasured(config: RunConfig) -> Iterator[None]:
    """Pass over that this machine is not measured, where no hardware was asked for."""
    try:
        yield
    except ConfigError:
        if config.run.hardware != "auto" or hardware.THIS_MACHINE in hardware.names():
            raise


def _show(config: RunConfig, plan: Plan | None, out: Console) -> dict[str, Any]:
    """Print it; gives what `--dry-run --json` prints."""
    setting = plan.setting if plan else Setting.from_config(config)
    if plan:
        plan_table.explain(plan, out)
        row = plan.to_json()
    else:
        memory = fullest(setting)
        for line in plan_table.lines_of(setting):
            terminal.say(out, line, " " * 10)
        plan_table.show_memory(memory, setting, None, out)
        terminal.say(
            out,
            "\nhow long a step takes is not known: `parallel3d plan --calibrate` measures "
            "this machine; or name one, --parallel3d.run.hardware",
        )
        row = choices_json(setting, memory)
    size, folder = checkpoint_bytes(setting), Path(config.run.directory)
    lacks = room.disk_lacks(folder, size)
    missing = f"; {folder.absolute()} has {decimal(lacks)} too little for one" if lacks else ""
    terminal.say(out, f"a checkpoint is about {decimal(size)}{missing}")
    out.print("dry run: nothing was trained")
    return {
        "dry_run": True,
        "plan": row,
        "checkpoint_bytes": size,
        "hardware": plan.request.hardware.name if plan else None,
        "config": config.to_dict(),
    }
