"""The cost and state of each run of a ladder, as a table and as JSON, and the tuned factors."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, isclose, log
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from parallel3d.base import terminal
from parallel3d.base.atomic import replace_text
from parallel3d.base.errors import ConfigError
from parallel3d.base.reader import flat
from parallel3d.base.step_lines import METRICS, newest
from parallel3d.base.terminal import Column
from parallel3d.config import RunConfig, hardware
from parallel3d.config.digest import PLACEMENT_SETTINGS, digest_of
from parallel3d.config.hardware import THIS_MACHINE
from parallel3d.extras.scaling.frontier import lowest
from parallel3d.extras.scaling.ladder.expand import CONFIGS, LadderRun, RateAndBatch, runs_of
from parallel3d.extras.scaling.ladder.ladder_file import load
from parallel3d.extras.scaling.runs import CONFIG, config_of, unique_tokens
from parallel3d.plan.impossible import refuse_impossible
from parallel3d.plan.memory.peak import fullest
from parallel3d.plan.memory.room import gib
from parallel3d.plan.report import plan_rows
from parallel3d.plan.report.plan_rows import choose
from parallel3d.plan.request import request_of
from parallel3d.plan.setting import Setting

REPEATS = 4
"""Epochs up to which repeated tokens are worth nearly as much as new ones (arXiv:2305.16264)."""
# Settings that training fills in, such as the size of the trained vocabulary, or that do not change
# results.
_APART = (*PLACEMENT_SETTINGS, "parallel3d.data.vocab_size")
# The planner's choices for a run: settings of DeepSpeed, and blocks of "parallel3d".
_PLANNED = (
    "zero_optimization",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
_PLANNED_BLOCKS = ("mesh", "plan", "pipeline")
FRESH = ("auto", "none")  # checkpoint.resume of runs that start at step 0
_COLUMNS = (
    Column("run", right=False),
    Column("blocks"),
    Column("head"),
    Column("embedding"),
    Column("tokens"),
    Column("tokens/N"),
    Column("FLOPs"),
    Column("exact/6ND"),
    Column("batch", line=1),
    Column("lr", line=1),
    Column("steps", line=1),
    Column("mesh", line=1),
    Column("GiB", line=1),
    Column("hours", line=1),
    Column("state", right=False, line=1),
    Column("loss", line=1),
)


@dataclass(frozen=True)
class Cost:
    """The predicted cost of a run."""

    mesh: str
    memory_bytes: int  # on the device that needs most
    hours: float | None  # None on unknown hardware


@dataclass(frozen=True)
class State:
    """The state of a run: "new", "unfinished" or "finished"."""

    name: str
    step: int = 0
    loss: float | None = None  # held-out loss
    standard_error: float | None = None


@dataclass(frozen=True)
class Rung:
    """A rung of the ladder: a run with its cost and state."""

    run: LadderRun
    cost: Cost
    state: State
    unique_tokens: int | None  # training tokens of the corpus, None if not known


@dataclass(frozen=True)
class Runs:
    """Runs in one directory, and the file that they come from."""

    file: Path
    directory: Path
    rungs: tuple[Rung, ...]
    """Trunks before their forks, held-out runs last."""
    warnings: tuple[str, ...] = ()

    @property
    def is_tuned(self) -> bool:
        """True if no run that tunes is unfinished."""
        return all(r.run.kind != "tune" or r.state.name == "finished" for r in self.rungs)

    def config_file(self, run: LadderRun) -> Path:
        """Return the config file that launch/train.py reads for a run."""
        return self.directory / CONFIGS / f"{run.name}.json"

    def forecast_file(self, run: LadderRun) -> Path:
        """Return the file of the registered forecast of a held-out run."""
        return self.directory / f"forecast-{run.name}.json"

    def write_configs(self) -> None:
        """Write the config file of every run."""
        for rung in self.rungs:
            path = self.config_file(rung.run)
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, f"{json.dumps(rung.run.config.to_dict(), indent=1)}\n")


def ladder_of(name: str) -> Runs:
    """Read a ladder file, and return its runs with their costs and current states.

    Raises ConfigError if the file is wrong, a run does not fit, or a folder has another run.
    """
    config, base, file = load(name)
    expanded = runs_of(config, base, file)
    states = [(run, state_of(run)) for run in expanded if run.kind == "tune"]
    if states and all(state.name == "finished" for _, state in states):
        tried = [(run.budget, run.factors, state.loss or inf) for run, state in states]
        expanded = runs_of(config, base, file, best_factors(tried))
    runs = with_costs(expanded)
    unique = config.unique_tokens or unique_tokens(Path(config.directory))
    rungs = tuple(Rung(run, cost, state_of(run), unique) for run, cost in runs)
    over = [run for run, _ in runs if unique and run.tokens > REPEATS * unique]
    warnings = []
    if over:
        warnings.append(
            f"{len(over)} runs read the corpus of {unique:,} tokens more than {REPEATS} times; "
            "repeated tokens are then worth less than new ones (arXiv:2305.16264), and a law "
            "fitted to these runs does not hold for new text"
        )
    return Runs(file, Path(config.directory), rungs, tuple(warnings))


def with_costs(runs: Sequence[LadderRun]) -> list[tuple[LadderRun, Cost]]:
    """Return each run with its cost, after choosing a mesh for runs with "plan".

    Raises ConfigError if a run does not fit, or if there is no hardware to plan for.
    """
    planned: dict[str, tuple[RunConfig, float | None, int]] = {}
    costs = []
    for run in runs:
        config = run.config
        key = f"{config.model} {config.train_batch_size} {run.devices} {config.parallel3d.mesh}"
        try:
            if key not in planned:
                planned[key] = _planned(config, run.devices)
        except ConfigError as error:
            raise ConfigError(f"the ladder cannot be run: {run.name}: {error}") from None
        chosen, seconds, memory = planned[key]
        if config.is_planned:  # `chosen` may be of another run of the same size
            raw = chosen.to_dict()
            own = config.to_dict()
            for key in _PLANNED:
                own[key] = raw[key]
            for key in _PLANNED_BLOCKS:
                own["parallel3d"][key] = raw["parallel3d"][key]
            run = replace(run, config=RunConfig.from_dict(own))
        hours = None if seconds is None else run.steps * run.own_share * seconds / 3600
        costs.append((run, Cost(str(chosen.mesh.sizes), memory, hours)))
    return costs


def _planned(config: RunConfig, devices: int) -> tuple[RunConfig, float | None, int]:
    """Return the resolved config, seconds per step (None if unknown) and bytes per device."""
    name = config.run.hardware
    if name == "auto" and (THIS_MACHINE in hardware.names() or config.is_planned):
        name = THIS_MACHINE
    if config.is_planned:
        config, plan = choose(config, devices, hardware.load(name))
        return config.resolve(devices), plan.time.seconds, plan.memory.total
    config = config.resolve(devices)
    refuse_impossible(config, devices)
    if name == "auto":
        return config, None, fullest(Setting.from_config(config)).total
    machine = hardware.load(name)
    plan = plan_rows.as_written(config, request_of(config, machine, devices))
    if not plan.fits:
        raise ConfigError(
            f"does not fit on {devices} x {machine.name}: {plan.reason}; smallest change: "
            f"{plan.remedy}"
        )
    return config, plan.time.seconds, plan.memory.total


def state_of(run: LadderRun) -> State:
    """Return the state of a run; raise ConfigError if its folder has a run with another config.

    Paths, mesh and offload may differ.
    """
    if not (run.folder / CONFIG).exists():
        return State("new")
    own = config_of(run.folder)
    if digest_of(own, _APART) != digest_of(run.config, _APART):
        apart = tuple(f"{path}." for path in (*_APART, "parallel3d.run", "parallel3d.checkpoint"))
        before = flat(own.to_dict())
        after = flat(run.config.to_dict())
        changed = ", ".join(
            f"{path}: {before.get(path)} -> {new}"
            for path, new in after.items()
            if before.get(path) != new and not f"{path}.".startswith(apart)
        )
        raise ConfigError(
            f"{run.folder}: has a run with another config than the ladder's ({changed}); remove "
            "it, or set another directory for the ladder"
        )
    last = newest(run.folder / METRICS)
    step = int(last.get("step", 0))
    if step < run.steps or not (run.kind == "trunk" or "held_out_loss" in last):
        return State("unfinished", step)
    if run.kind == "trunk":  # without a cool-down its loss is not used
        is_whole = set(run.config.checkpoint.at).issubset(checkpoints(run.folder))
        return State("finished" if is_whole else "unfinished", step)
    evaluation = (last.get("validation") or {}).get("held_out") or {}
    return State("finished", step, last.get("held_out_loss"), evaluation.get("standard_error"))


def checkpoints(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a run's folder, in ascending order."""
    manifests = (folder / "checkpoints").glob("step-*/manifest.json")
    steps = (path.parent.name.removeprefix("step-") for path in manifests)
    return sorted(int(step) for step in steps if step.isdecimal())  # not step-N.rejected


def resume_of(run: LadderRun) -> str:
    """Return the value of checkpoint.resume to start a run with.

    A fork names its newest checkpoint by number, since with "auto" it would start at step 0,
    without the trunk's steps, if its checkpoints were damaged.
    """
    first = str(run.config.checkpoint.resume)
    own = checkpoints(run.folder)
    if not own:
        return first
    return "auto" if first in FRESH else str(own[-1])


def show(ladder: Runs, out: Console) -> None:
    """Print a row for every run, the total cost, and warnings."""
    terminal.show(out, _COLUMNS, [_row(rung) for rung in ladder.rungs])
    total = to_json(ladder)["total"]
    hours = total["device_hours"]
    known = "unknown (run `parallel3d plan --calibrate`, or set base.parallel3d.run.hardware)"
    if hours is not None:
        known = f"{hours:.3g}"
    terminal.say(
        out,
        f"total: {total['runs']} runs, {total['flops']:.3g} FLOPs, device hours: {known}; "
        f"{total['finished']} finished",
    )
    if any(rung.run.kind == "tune" for rung in ladder.rungs):
        rate, batch = next(rung.run.factors for rung in ladder.rungs if rung.run.kind == "fit")
        words = f"times {rate:.3g} and {batch:.3g}" if ladder.is_tuned else "not tuned yet"
        terminal.say(out, f"tuned at the two smallest budgets: rate and batch {words}", "  ")
    for warning in ladder.warnings:
        terminal.say(out, f"WARNING: {warning}", "  ")


def _row(rung: Rung) -> tuple[str, ...]:
    run = rung.run
    cost = rung.cost
    state = rung.state
    counts = rung.run.counts
    reached = f" {state.step}" if state.name == "unfinished" else ""
    return (
        run.name,
        f"{counts.transformer:,}",
        f"{counts.head:,}",
        f"{counts.embedding:,}",
        f"{run.tokens:,}",
        f"{run.tokens / counts.with_head:.3g}",
        f"{run.flops:.3g}",
        f"{run.exact_flops / run.flops:.3f}",
        f"{run.batch_tokens:,}",
        f"{run.config.optimizer.params.lr:.3g}",
        f"{run.steps:,}",
        cost.mesh,
        gib(cost.memory_bytes),
        "?" if cost.hours is None else f"{cost.hours:.3g}",
        f"{state.name}{reached}",
        "" if state.loss is None else f"{state.loss:.4f}",
    )


def to_json(ladder: Runs) -> dict[str, Any]:
    """Return the object that --json prints; its keys are published and do not change."""
    hours = [rung.cost.hours for rung in ladder.rungs]
    known = [h * r.run.devices for h, r in zip(hours, ladder.rungs, strict=True) if h is not None]
    own = [(rung.run, rung.run.own_share) for rung in ladder.rungs]
    return {
        "runs": [_to_json(rung) for rung in ladder.rungs],
        "total": {
            "runs": len(ladder.rungs),
            "finished": sum(rung.state.name == "finished" for rung in ladder.rungs),
            "tokens": sum(run.tokens * share for run, share in own),
            "flops": sum(run.flops * share for run, share in own),
            "exact_flops": sum(run.exact_flops * share for run, share in own),
            "device_hours": sum(known) if len(known) == len(hours) else None,
            "warnings": list(ladder.warnings),
        },
    }


def _to_json(rung: Rung) -> dict[str, object]:
    run = rung.run
    cost = rung.cost
    state = rung.state
    counts = rung.run.counts
    parts = {name: getattr(counts, name) for name in ("embedding", "head", "transformer")}
    return {
        "name": run.name,
        "kind": run.kind,
        "params": parts,
        "tokens": run.tokens,
        "flops": run.flops,
        "exact_flops": run.exact_flops,
        "steps": run.steps,
        "own_steps": run.steps - run.steps_done,
        "batch_tokens": run.batch_tokens,
        "learning_rate": run.config.optimizer.params.lr,
        "seed": run.config.train.seed,
        "repeats": None if rung.unique_tokens is None else run.tokens / rung.unique_tokens,
        "mesh": cost.mesh,
        "devices": run.devices,
        "memory_bytes": cost.memory_bytes,
        "hours": cost.hours,
        "state": state.name,
        "loss": state.loss,
        "standard_error": state.standard_error,
    }


def best_factors(tried: Iterable[tuple[float, RateAndBatch, float]]) -> RateAndBatch:
    """Return the factors of learning rate and batch with the lowest loss, as means over budgets.

    - `tried`: budget, both factors and loss of each run; a batch is tried with the rate times its
      square root.

    Raises ConfigError if the best rate has no other on one side.
    """
    rates: dict[float, list[tuple[float, float]]] = {}
    batches: dict[float, list[tuple[float, float]]] = {}
    for budget, (rate, batch), loss in tried:
        if batch == 1:
            rates.setdefault(budget, []).append((log(rate), loss))
        if isclose(rate, batch**0.5):
            batches.setdefault(budget, []).append((log(batch), loss))
    for curve in rates.values():
        curve.sort()
        if min(curve, key=lambda pair: pair[1]) in (curve[0], curve[-1]):
            raise ConfigError(
                "hyperparameters.tune.learning_rate_factors = "
                f"{[round(exp(x), 6) for x, _ in curve]}: the best one must have others on both "
                "sides; add factors beyond it, and run again"
            )
    return (
        exp(fmean(lowest(sorted(curve)) for curve in rates.values())),
        exp(fmean(lowest(sorted(curve)) for curve in batches.values())),
    )
