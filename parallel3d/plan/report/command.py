"""What launch/plan.py and a dry run do with a config, step by step."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from parallel3d.config import RunConfig
from parallel3d.errors import ConfigError
from parallel3d.hardware import THIS_MACHINE, Hardware
from parallel3d.plan.report import parts, table
from parallel3d.plan.search.best_first import Found, search
from parallel3d.plan.search.plans import CHOICES, Plan, Request, request_of
from parallel3d.plan.search.remedy import evaluate, gib
from parallel3d.plan.setting import Setting
from parallel3d.section import Problem, Problems

FIX = f"choices that are made already: {', '.join(CHOICES)}"


def console(as_json: bool, width: int | None = None) -> Console:
    """Where a command prints: beside --json on standard error, and in a pipe as wide as a table."""
    out = Console(stderr=as_json, highlight=False, markup=False, soft_wrap=True, width=width)
    if width is None and not out.is_terminal:
        return console(as_json, table.PIPED)
    return out


def hardware_of(config: RunConfig) -> str:
    """The hardware that a config names, else this machine."""
    return THIS_MACHINE if config.run.hardware == "auto" else config.run.hardware


def devices_of(config: RunConfig, hardware: Hardware) -> int:
    """The devices of a config's mesh, else those of this machine or of one node."""
    if not config.is_planned and isinstance(config.mesh.dp, int):
        return config.mesh.pp * config.mesh.dp * config.mesh.tp
    if hardware.cores is not None:
        return int(hardware.cores.count.value)
    if hardware.devices_per_node is not None:
        return int(hardware.devices_per_node.value)
    rule, remedy = "is not known", "say how many"
    raise Problems([Problem("--devices", "", rule, remedy)], "the plan")


def ask(config: RunConfig, hardware: Hardware, devices: int, fix: Sequence[str]) -> Request:
    """The request, with what `--fix NAME=VALUE ...` fixes; raises ConfigError."""
    fixed: dict[str, Any] = {}
    for word in fix:
        name, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"--fix {word}: has no value; write NAME=VALUE")
        try:
            fixed[name] = json.loads(text.lower())
        except json.JSONDecodeError:
            fixed[name] = text
    return request_of(config, hardware, devices, fixed)


def find(request: Request, rows: int) -> Found:
    """The rows of a request."""
    if rows < 1:
        raise ConfigError(f"--rows {rows}: shows nothing; use 1 or more")
    return search(request, rows)


def show(found: Found, request: Request, out: Console) -> None:
    """Print the table; where nothing fits, what would."""
    table.show(found, request, out)
    if found.plans:
        parts.show(found.plans, request, out)
    table.closing(found, out)
    if found.least is not None:
        out.print(nothing_fits(found.least))


def nothing_fits(least: Plan) -> str:
    """What to do where no plan fits, by the one that needs least."""
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


def explain(found: Found, number: int, svg: Path | None, trace: Path | None, out: Console) -> None:
    """Print row `number` in detail, and draw it; raises ConfigError where there is none."""
    from parallel3d.plan.report.timeline import drawing

    rows = found.rows
    if not 1 <= number <= len(rows):
        raise ConfigError(f"--explain {number}: there are {len(rows)} rows; use 1 to {len(rows)}")
    plan = rows[number - 1]
    table.explain(plan, out)
    if svg or trace:
        picture, events = drawing(plan)
        if svg:
            svg.write_text(picture, encoding="utf-8")
        if trace:
            trace.write_text(json.dumps(events), encoding="utf-8")


def to_json(found: Found, request: Request) -> dict[str, Any]:
    """What --json prints: the rows, those that do not fit behind those that do."""
    return {
        "plans": [plan.to_json() for plan in found.rows],
        "hardware": request.hardware.name,
        "devices": request.devices,
        "global_batch_size": request.global_batch_size,
        "num_params": request.base.num_params,
        "least": found.least.to_json() if found.least else None,
    }


def as_written(config: RunConfig, request: Request) -> Plan:
    """The plan of a resolved config as it is."""
    setting = Setting.from_config(config)
    return evaluate(request, setting.but(layers=request.base.layers))
