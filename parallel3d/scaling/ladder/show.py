"""A ladder's runs as a table for a terminal, and as JSON."""

from typing import Any

from rich.console import Console

from parallel3d.base import terminal
from parallel3d.base.terminal import Column
from parallel3d.plan.search.remedy import gib
from parallel3d.scaling.ladder.file import LAWS
from parallel3d.scaling.ladder.plan import Ladder, Rung

_COLUMNS = (
    Column("run", right=False), Column("blocks"), Column("head"), Column("embedding"),
    Column("tokens"), Column("tokens/N"), Column("FLOPs"), Column("exact/6ND"),
    Column("batch", line=1), Column("lr", line=1), Column("steps", line=1), Column("mesh", line=1),
    Column("GiB", line=1), Column("hours", line=1), Column("state", right=False, line=1),
    Column("loss", line=1),
)  # fmt: skip


def show(ladder: Ladder, out: Console) -> None:
    """Print every run, the total cost, and warnings."""
    terminal.show(out, _COLUMNS, [_row(rung) for rung in ladder.rungs])
    total = to_json(ladder)["total"]
    hours = total["device_hours"]
    unknown = "not known: `parallel3d plan --calibrate`, or base.parallel3d.run.hardware"
    terminal.say(
        out,
        f"total: {total['runs']} runs, {total['flops']:.3g} FLOPs, device hours: "
        f"{unknown if hours is None else f'{hours:.3g}'}; {total['finished']} finished",
    )
    given = ladder.config.hyperparameters
    factor = given.learning_rate_factor
    times = "" if factor == 1 else f"{factor:g} times "
    terminal.say(out, f"learning rate: {times}{_source(given.learning_rate)}", "  ")
    terminal.say(out, f"batch, tokens: {_source(given.batch_tokens)}", "  ")
    for warning in ladder.warnings:
        terminal.say(out, f"WARNING: {warning}", "  ")


def _source(wanted: float | str) -> str:
    return f"{wanted}, {LAWS[wanted].source}" if isinstance(wanted, str) else f"{wanted:g}, given"


def _row(rung: Rung) -> tuple[str, ...]:
    run, cost, state = rung.run, rung.cost, rung.state
    config, counts = run.config, run.counts
    lr = config.optimizer.params.lr
    reached = f" {state.step}" if state.name == "unfinished" else ""
    return (
        run.name, f"{counts.transformer:,}", f"{counts.head:,}", f"{counts.embedding:,}",
        f"{run.tokens:,}", f"{run.tokens / counts.with_head:.3g}", f"{run.flops:.3g}",
        f"{run.exact_flops / run.flops:.3f}", f"{run.batch_tokens:,}", f"{lr:.3g}",
        f"{run.steps:,}", cost.mesh, gib(cost.memory_bytes),
        "?" if cost.hours is None else f"{cost.hours:.3g}", f"{state.name}{reached}",
        "" if state.loss is None else f"{state.loss:.4f}",
    )  # fmt: skip


def to_json(ladder: Ladder) -> dict[str, Any]:
    """The object that --json prints; its keys are published and do not change."""
    rows = [_to_json(rung) for rung in ladder.rungs]
    hours: list[float | None] = [
        None if rung.cost.hours is None else rung.cost.hours * rung.run.devices
        for rung in ladder.rungs
    ]
    known = [x for x in hours if x is not None]
    return {
        "runs": rows,
        "total": {
            "runs": len(rows),
            "finished": sum(row["state"] == "finished" for row in rows),
            "tokens": sum(r.run.tokens * r.run.own_share for r in ladder.rungs),
            "flops": sum(r.run.flops * r.run.own_share for r in ladder.rungs),
            "exact_flops": sum(r.run.exact_flops * r.run.own_share for r in ladder.rungs),
            "device_hours": sum(known) if len(known) == len(hours) else None,
            "warnings": list(ladder.warnings),
        },
    }


def _to_json(rung: Rung) -> dict[str, Any]:
    run, cost, state = rung.run, rung.cost, rung.state
    counts, unique = run.counts, rung.unique_tokens
    return {
        "name": run.name,
        "kind": run.kind,
        "params": {
            "embedding": counts.embedding, "head": counts.head, "transformer": counts.transformer,
        },
        "tokens": run.tokens,
        "flops": run.flops,
        "exact_flops": run.exact_flops,
        "steps": run.steps,
        "own_steps": run.steps - run.steps_done,
        "batch_tokens": run.batch_tokens,
        "learning_rate": run.config.optimizer.params.lr,
        "seed": run.config.train.seed,
        "repeats": None if unique is None else run.tokens / unique,
        "mesh": cost.mesh,
        "devices": run.devices,
        "memory_bytes": cost.memory_bytes,
        "hours": cost.hours,
        "state": state.name,
        "loss": state.loss,
        "standard_error": state.standard_error,
    }  # fmt: skip
