"""The steps of `parallel3d plan` and of a dry run, from a config to rows of plans."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from parallel3d.base import reader, terminal
from parallel3d.base.errors import ConfigError
from parallel3d.base.section import ABSENT, Problem, Problems
from parallel3d.config import RunConfig, hardware
from parallel3d.config.hardware import THIS_MACHINE, Hardware
from parallel3d.plan.report import plan_table
from parallel3d.plan.search.best_first import Ranking, search
from parallel3d.plan.search.plans import CHOICES, Plan, Request, request_of
from parallel3d.plan.search.remedy import evaluate, gib
from parallel3d.plan.setting import Setting

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
    if machine.devices_per_node is not None:
        return int(machine.devices_per_node.value)
    rule, remedy = "is missing", "set the number of devices"
    raise Problems([Problem("--devices", ABSENT, rule, remedy)], "the plan")


def make_request(config: RunConfig, machine: Hardware, devices: int, fix: Sequence[str]) -> Request:
    """Return the request of a config with the choices of `--fix NAME=VALUE ...`.

    Raises ConfigError for a malformed or repeated choice.
    """
    fixed: dict[str, object] = {}
    for word in fix:
        name, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"--fix {word}: has no value; write NAME=VALUE")
        if name in fixed:
            raise ConfigError(f"--fix {name}: is set twice; set it once")
        fixed[name] = reader.value(text.lower())
    return request_of(config, machine, devices, fixed)


def rank_plans(
    request: Request, rows: int | None, found: Callable[[Plan], None] | None = None
) -> Ranking:
    """Return the rows of a request: `rows`, or 20 that fit and the faster ones that do not.

    `found` is called with each row that fits as soon as it is known.
    """
    ranking = search(request, rows or ROWS, found=found)
    if rows is None:
        return ranking
    shown = ranking.too_large[: max(0, rows - len(ranking.plans))]
    return replace(ranking, too_large=shown, num_hidden=len(ranking.too_large) - len(shown))


def show(ranking: Ranking, request: Request, out: Console) -> None:
    """Print the planner's table and, if no plan fits, how to make one fit."""
    plan_table.show(ranking, request, out)
    if ranking.least is not None:
        terminal.say(out, nothing_fits(ranking.least))


def nothing_fits(least: Plan) -> str:
    """Return the message for a request without a plan that fits.

    `least` is the plan that needs the least memory.
    """
    request, memory = least.request, least.memory
    s, room = least.setting, request.hardware.memory_bytes.value
    over = memory.total - room
    host = request.hardware.host
    remedies = [
        "more devices",
        f"devices with {gib(memory.total)} GiB"
        if over > 0
        else f"hosts with {gib(memory.host)} GiB per device",
    ]
    if request.fixed:
        remedies.insert(0, f"fewer fixed choices (now {', '.join(request.fixed)})")
    elif host is None:
        remedies.append("hardware with a described host, for offload")
    excess = f"{over:,.0f} bytes more than a device has" if over > 0 else least.reason
    return (
        f"NOTHING FITS on {request.devices:,} x {request.hardware.name}: the smallest plan needs "
        f"{gib(memory.total)} GiB ({excess}), with {s.mesh.label}, "
        f"ZeRO-{s.zero_stage}, micro batch {s.shape.batch}, recompute {s.recompute}, offload: "
        f"{least.offload}; use {', or '.join(remedies)}"
    )


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


def to_json(ranking: Ranking, request: Request) -> dict[str, object]:
    """Return the JSON of `parallel3d plan --json`: rows that fit, then rows that do not.

    Only a model with parameters that some tokens do not use has "num_active_params".
    """
    base = request.base
    active = {"num_active_params": base.num_active_params}
    return {
        "plans": [plan.to_json() for plan in ranking.rows],
        "hardware": request.hardware.name,
        "devices": request.devices,
        "global_batch_size": request.global_batch_size,
        "num_params": base.num_params,
        **(active if base.num_active_params != base.num_params else {}),
        "least": ranking.least.to_json() if ranking.least else None,
    }


def as_written(config: RunConfig, request: Request) -> Plan:
    """Return the plan of a resolved config, without changing any choice."""
    setting = Setting.from_config(config)
    return evaluate(request, setting.but(layers=request.base.layers))
