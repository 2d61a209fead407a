"""Steps of launch/plan.py and of a dry run, from a config to its rows."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from parallel3d.base import reader, terminal
from parallel3d.base.errors import ConfigError
from parallel3d.base.section import Problem, Problems
from parallel3d.config import RunConfig, hardware
from parallel3d.config.hardware import THIS_MACHINE, Hardware
from parallel3d.plan.report import plan_table
from parallel3d.plan.search.best_first import FoundPlans, search
from parallel3d.plan.search.plans import CHOICES, Plan, Request, request_of
from parallel3d.plan.search.remedy import evaluate, gib
from parallel3d.plan.setting import Setting

ROWS = 20  # plans that fit, where it is not said how many to show
MOST_DEVICES = 10_000_000  # what divides them is looked for one by one
FIX = f"choices that are made already: {', '.join(CHOICES)}"


def hardware_of(config: RunConfig, name: str | None = None) -> Hardware:
    """The hardware called `name`, else the hardware that the config names, else this machine."""
    if name is not None:
        return hardware.load(name, "--hardware")
    named = config.run.hardware
    return hardware.load(THIS_MACHINE if named == "auto" else named)


def devices_of(config: RunConfig, machine: Hardware) -> int:
    """Number of devices in a config's mesh, else of this machine or of one node."""
    if not config.is_planned and isinstance(config.mesh.dp, int):
        return config.mesh.pp * config.mesh.dp * config.mesh.tp
    if machine.cores is not None:
        return int(machine.cores.count.value)
    if machine.devices_per_node is not None:
        return int(machine.devices_per_node.value)
    rule, remedy = "is not known", "say how many"
    raise Problems([Problem("--devices", "", rule, remedy)], "the plan")


def ask(config: RunConfig, machine: Hardware, devices: int, fix: Sequence[str]) -> Request:
    """The request of a config with the choices of `--fix NAME=VALUE ...`; raises ConfigError."""
    fixed: dict[str, Any] = {}
    for word in fix:
        name, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"--fix {word}: has no value; write NAME=VALUE")
        if name in fixed:
            raise ConfigError(f"--fix {name}: stands twice; keep one of them")
        fixed[name] = reader.value(text.lower())
    return request_of(config, machine, devices, fixed)


def find(request: Request, rows: int | None) -> FoundPlans:
    """The rows of a request: `rows` of them, or 20 that fit and the faster ones that do not."""
    found = search(request, rows or ROWS)
    if rows is None:
        return found
    shown = found.too_large[: max(0, rows - len(found.plans))]
    return replace(found, too_large=shown, num_hidden=len(found.too_large) - len(shown))


def show(found: FoundPlans, request: Request, out: Console) -> None:
    """Print the planner's table, or, where no plan fits, what would make one fit."""
    plan_table.show(found, request, out)
    if found.least is not None:
        terminal.say(out, nothing_fits(found.least))


def nothing_fits(least: Plan) -> str:
    """What to do where no plan fits, from the plan that needs least memory."""
    request, memory = least.request, least.memory
    s, room = least.setting, request.hardware.memory_bytes.value
    over = memory.total - room
    host = request.hardware.host
    remedies = ["more devices", f"devices with {gib(memory.total)} GiB"]
    if request.fixed:
        remedies.insert(0, f"fix less than {', '.join(request.fixed)}")
    elif host is None:
        remedies.append("hardware whose host is described, for offload")
    said = f"{over:,.0f} bytes more than a device has" if over > 0 else least.reason
    return (
        f"NOTHING FITS on {request.devices:,} x {request.hardware.name}: the least is "
        f"{gib(memory.total)} GiB ({said}), with pp {s.pp} × dp {s.dp} × tp {s.tp}, "
        f"ZeRO-{s.zero_stage}, micro batch {s.shape.batch}, recompute {s.recompute}, offload: "
        f"{least.offload}; use {', or '.join(remedies)}"
    )


def explain(
    found: FoundPlans, number: int, svg: Path | None, trace: Path | None, out: Console
) -> None:
    """Print row `number` in detail and draw it; raises ConfigError if the table has no such row."""
    from parallel3d.plan.report.timeline import drawing

    rows = found.rows
    if not 1 <= number <= len(rows):
        raise ConfigError(f"--explain {number}: there are {len(rows)} rows; use 1 to {len(rows)}")
    plan = rows[number - 1]
    plan_table.explain(plan, out)
    if svg or trace:
        picture, events = drawing(plan)
        for path, text in ((svg, picture), (trace, json.dumps(events))):
            if path:
                path.write_text(text, encoding="utf-8")
                terminal.say(out, f"written to {path}")


def to_json(found: FoundPlans, request: Request) -> dict[str, Any]:
    """The JSON of launch/plan.py --json: rows that fit, then rows that do not."""
    return {
        "plans": [plan.to_json() for plan in found.rows],
        "hardware": request.hardware.name,
        "devices": request.devices,
        "global_batch_size": request.global_batch_size,
        "num_params": request.base.num_params,
        "least": found.least.to_json() if found.least else None,
    }


def as_written(config: RunConfig, request: Request) -> Plan:
    """The plan of a resolved config exactly as it is written."""
    setting = Setting.from_config(config)
    return evaluate(request, setting.but(layers=request.base.layers))
