"""A ladder as it stands: each run with its cost and state, as a table and as JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from parallel3d.base import terminal
from parallel3d.base.atomic import replace_text
from parallel3d.base.errors import ConfigError
from parallel3d.base.terminal import Column
from parallel3d.config import RunConfig, hardware
from parallel3d.config.hardware import THIS_MACHINE
from parallel3d.config.run import PLACED, digest_of
from parallel3d.plan.impossible import refuse_impossible
from parallel3d.plan.memory.peak import fullest
from parallel3d.plan.report import plan_rows
from parallel3d.plan.report.choose import choose
from parallel3d.plan.search.plans import request_of
from parallel3d.plan.search.remedy import gib
from parallel3d.plan.setting import Setting
from parallel3d.scaling.ladder.expand import CONFIGS, LadderRun, runs_of
from parallel3d.scaling.ladder.ladder_file import LAWS, LadderConfig, load
from parallel3d.scaling.runs import CONFIG, METRICS, NoEnd, config_of, last_line, unique_tokens

REPEATS = 4
"""Passes over a corpus up to which repeated tokens are worth nearly as much as new ones
(arXiv:2305.16264)."""
_BEYOND = 10  # times the largest fitted FLOPs, of a held-out run that tests a forecast
_FEW_STEPS = 50
_FROM_PLAN = ("zero_optimization", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Training fills in the mesh and the tokens that a tokenizer came out with.
_APART = (*PLACED, "parallel3d.data.vocab_size")
FRESH = ("auto", "none")  # checkpoint.resume of runs that begin at step 0
_COLUMNS = (
    Column("run", right=False), Column("blocks"), Column("head"), Column("embedding"),
    Column("tokens"), Column("tokens/N"), Column("FLOPs"), Column("exact/6ND"),
    Column("batch", line=1), Column("lr", line=1), Column("steps", line=1), Column("mesh", line=1),
    Column("GiB", line=1), Column("hours", line=1), Column("state", right=False, line=1),
    Column("loss", line=1),
)  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """Bytes of a run's fullest device, and hours of its steps; None on unknown hardware."""

    mesh: str
    memory_bytes: int
    hours: float | None


@dataclass(frozen=True)
class State:
    """State of a run: "new", "unfinished" or "finished", with steps, held-out loss and error."""

    name: str
    step: int = 0
    loss: float | None = None
    standard_error: float | None = None


@dataclass(frozen=True)
class Rung:
    """A run with its cost and state; training tokens of its corpus where known."""

    run: LadderRun
    cost: Cost
    state: State
    unique_tokens: int | None


@dataclass(frozen=True)
class Ladder:
    """The ladder of a file: its runs, trunks before their forks, held-out runs last."""

    file: Path
    config: LadderConfig
    rungs: tuple[Rung, ...]
    warnings: tuple[str, ...]

    @property
    def directory(self) -> Path:
        """The folder of the ladder's runs."""
        return Path(self.config.directory)

    def config_file(self, run: LadderRun) -> Path:
        """Return the config file that launch/train.py reads for a run."""
        return self.directory / CONFIGS / f"{run.name}.json"

    def forecast_file(self, run: LadderRun) -> Path:
        """Return the file in which the forecast of a held-out run is registered."""
        return self.directory / f"forecast-{run.name}.json"

    def write_configs(self) -> None:
        """Write each run's config beside the runs."""
        for rung in self.rungs:
            path = self.config_file(rung.run)
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, f"{json.dumps(rung.run.config.to_dict(), indent=1)}\n")


def ladder_of(name: str) -> Ladder:
    """Return the ladder in a file as it stands; ConfigError where the file makes no ladder."""
    config, base, file = load(name)
    runs = with_costs(runs_of(config, base, file))
    unique = config.unique_tokens or unique_tokens(Path(config.directory))
    rungs = tuple(Rung(run, cost, state_of(run), unique) for run, cost in runs)
    return Ladder(file, config, rungs, tuple(_warnings([run for run, _ in runs], unique)))


def with_costs(runs: Sequence[LadderRun]) -> list[tuple[LadderRun, Cost]]:
    """Return the runs with their costs, each mesh chosen where it is "plan".

    Raises ConfigError where a run does not fit, or no hardware is known to plan for.
    """
    planned: dict[str, tuple[RunConfig, float | None, int]] = {}
    found, bad = [], []
    for run in runs:
        config = run.config
        key = f"{config.model} {config.train_batch_size} {run.devices} {config.parallel3d.mesh}"
        try:
            if key not in planned:
                planned[key] = _planned(config, run.devices)
        except ConfigError as error:
            bad.append(f"{run.name}: {error}")
            continue
        chosen, seconds, memory = planned[key]
        if config.is_planned:  # perhaps for another run of the same size
            raw, own = chosen.to_dict(), config.to_dict()
            own |= {key: raw[key] for key in _FROM_PLAN}
            own["parallel3d"] |= {k: raw["parallel3d"][k] for k in ("mesh", "plan", "pipeline")}
            run = replace(run, config=RunConfig.from_dict(own))
        hours = None if seconds is None else run.steps * run.own_share * seconds / 3600
        mesh = chosen.mesh
        found.append((run, Cost(f"{mesh.pp}x{mesh.dp}x{mesh.tp}", memory, hours)))
    if bad:
        more = f"; and {len(bad) - 1} more runs" if len(bad) > 1 else ""
        raise ConfigError(f"the ladder has runs that cannot be: {bad[0]}{more}")
    return found


def _planned(config: RunConfig, devices: int) -> tuple[RunConfig, float | None, int]:
    """Return the config as it will run, seconds of a step, and bytes of the fullest device."""
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
        remedy = plan.remedy or 'a larger mesh, or "mesh": "plan" with more devices'
        raise ConfigError(f"does not fit on {devices} x {machine.name}: {plan.reason}; {remedy}")
    return config, plan.time.seconds, plan.memory.total


def _warnings(runs: Sequence[LadderRun], unique: int | None) -> Iterator[str]:
    fitted = [run for run in runs if run.kind == "fit"]
    sizes, most = len({run.counts for run in fitted}), max(run.flops for run in fitted)
    if sizes < 3:
        yield f"{sizes} sizes: the parametric law needs 3, and a profile of a budget, too"
    for run in runs:
        if run.kind == "held-out" and run.flops < _BEYOND * most * 0.98:
            yield (
                f"{run.name}: {run.flops / most:.2g} times the largest fitted FLOPs; a forecast "
                f"is tested by {_BEYOND} times or more"
            )
    if few := [run.name for run in runs if run.steps < _FEW_STEPS]:
        remedy = "give a smaller hyperparameters.batch_tokens"
        yield f"{few[0]}: fewer than {_FEW_STEPS} steps; {remedy}"
    if unique is None:
        yield "repeats of the corpus are not known before `run` prepares it; or give unique_tokens"
    elif over := [run for run in runs if run.tokens > REPEATS * unique]:
        longest = max(over, key=lambda run: run.tokens)
        yield (
            f"{len(over)} runs read the corpus of {unique:,} tokens more than {REPEATS} times "
            f"({longest.name}: {longest.tokens / unique:.1f}); from there on repeated tokens are "
            "worth less than new ones (arXiv:2305.16264): the law that is fitted is not that of "
            "fresh text"
        )


def state_of(run: LadderRun) -> State:
    """Return the state of a run; raises ConfigError where its folder holds another config's.

    Two configs are the same whatever their paths, mesh and offload.
    """
    if not (run.folder / CONFIG).exists():
        return State("new")
    try:
        own = config_of(run.folder)
    except NoEnd as why:
        raise ConfigError(f"{run.folder}: {why}; remove it") from None
    if digest_of(own, _APART) != digest_of(run.config, _APART):
        changed = ", ".join(_changes(own.to_dict(), run.config.to_dict())) or "its settings"
        raise ConfigError(
            f"{run.folder}: is of another config than the ladder's run of that name ({changed}); "
            "remove it, or give the ladder another directory"
        )
    try:
        last = last_line(run.folder / METRICS)
    except NoEnd:
        return State("unfinished")
    step = int(last["step"])
    if step < run.steps:
        return State("unfinished", step)
    if run.kind == "trunk":  # its loss at a constant rate is nobody's
        needed = set(run.config.checkpoint.at)
        return State("finished" if needed <= set(checkpoints(run)) else "unfinished", step)
    if "held_out_loss" not in last:
        return State("unfinished", step)
    found = (last.get("validation") or {}).get("held_out") or {}
    return State("finished", step, last.get("held_out_loss"), found.get("standard_error"))


def checkpoints(run: LadderRun) -> list[int]:
    """Return steps of the run's own complete checkpoints, ascending."""
    found = (run.folder / "checkpoints").glob("step-*/manifest.json")
    steps = (path.parent.name.removeprefix("step-") for path in found)
    return sorted(int(step) for step in steps if step.isdecimal())  # others were set aside


def resume_of(run: LadderRun) -> str:
    """Return the checkpoint.resume with which a run is to be started now.

    A fork goes on with its own newest by number: "auto" would start it at step 0 if damaged.
    """
    first, own = str(run.config.checkpoint.resume), checkpoints(run)
    if not own:
        return first
    return "auto" if first in FRESH else str(own[-1])


def _changes(was: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the settings that tell two configs apart, as "path: old -> new"."""
    for name in now:
        path = f"{prefix}{name}"
        there, here = was.get(name), now[name]
        if there == here or path in (*_APART, "parallel3d.run", "parallel3d.checkpoint"):
            continue
        if isinstance(there, Mapping) and isinstance(here, Mapping):
            yield from _changes(there, here, f"{path}.")
        else:
            yield f"{path}: {json.dumps(there)} -> {json.dumps(here)}"


def show(ladder: Ladder, out: Console) -> None:
    """Print every run, the total cost, and warnings."""
    terminal.show(out, _COLUMNS, [_row(rung) for rung in ladder.rungs])
    total = to_json(ladder)["total"]
    hours = "not known: `parallel3d plan --calibrate`, or base.parallel3d.run.hardware"
    if total["device_hours"] is not None:
        hours = f"{total['device_hours']:.3g}"
    terminal.say(
        out,
        f"total: {total['runs']} runs, {total['flops']:.3g} FLOPs, device hours: {hours}; "
        f"{total['finished']} finished",
    )
    given = ladder.config.hyperparameters
    times = "" if (factor := given.learning_rate_factor) == 1 else f"{factor:g} times "
    for what, wanted in (
        (f"learning rate: {times}", given.learning_rate), ("batch, tokens: ", given.batch_tokens),
    ):  # fmt: skip
        is_law = isinstance(wanted, str)
        source = LAWS[str(wanted)].source if is_law else "given"
        shown = wanted if is_law else f"{wanted:g}"
        terminal.say(out, f"{what}{shown}, {source}", "  ")
    for warning in ladder.warnings:
        terminal.say(out, f"WARNING: {warning}", "  ")


def _row(rung: Rung) -> tuple[str, ...]:
    run, cost, state, counts = rung.run, rung.cost, rung.state, rung.run.counts
    reached = f" {state.step}" if state.name == "unfinished" else ""
    return (
        run.name, f"{counts.transformer:,}", f"{counts.head:,}", f"{counts.embedding:,}",
        f"{run.tokens:,}", f"{run.tokens / counts.with_head:.3g}", f"{run.flops:.3g}",
        f"{run.exact_flops / run.flops:.3f}", f"{run.batch_tokens:,}",
        f"{run.config.optimizer.params.lr:.3g}", f"{run.steps:,}", cost.mesh,
        gib(cost.memory_bytes), "?" if cost.hours is None else f"{cost.hours:.3g}",
        f"{state.name}{reached}", "" if state.loss is None else f"{state.loss:.4f}",
    )  # fmt: skip


def to_json(ladder: Ladder) -> dict[str, Any]:
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


def _to_json(rung: Rung) -> dict[str, Any]:
    run, cost, state, counts = rung.run, rung.cost, rung.state, rung.run.counts
    parts = {name: getattr(counts, name) for name in ("embedding", "head", "transformer")}
    return {
        "name": run.name, "kind": run.kind, "params": parts, "tokens": run.tokens,
        "flops": run.flops, "exact_flops": run.exact_flops, "steps": run.steps,
        "own_steps": run.steps - run.steps_done, "batch_tokens": run.batch_tokens,
        "learning_rate": run.config.optimizer.params.lr, "seed": run.config.train.seed,
        "repeats": None if rung.unique_tokens is None else run.tokens / rung.unique_tokens,
        "mesh": cost.mesh, "devices": run.devices, "memory_bytes": cost.memory_bytes,
        "hours": cost.hours, "state": state.name, "loss": state.loss,
        "standard_error": state.standard_error,
    }  # fmt: skip
