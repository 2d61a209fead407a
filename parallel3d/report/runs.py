"""The report of training runs: curves, the plan beside what was measured, and what differs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig, hardware
from parallel3d.config.hardware import Hardware
from parallel3d.plan.memory.peak import per_rank
from parallel3d.plan.report import plan_rows
from parallel3d.plan.search.plans import Plan, request_of
from parallel3d.plan.setting import Setting
from parallel3d.report.page import MARK, Part, figures, html, png, style, table

if TYPE_CHECKING:  # of an extra
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_POINTS = 2000  # of a curve
_MOST_ROWS = 40  # of the table of differences
_COLORS = ("#31276b", "#c0392b", "#1e8449", "#b9770e", "#2e86c1", "#7d3c98", "#616a6b", "#a04000")
_MIB = 2**20


@dataclass(frozen=True)
class Run:
    """A run's folder: its name, its config, a dict per step, and its journal of launches."""

    name: str
    config: RunConfig
    steps: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]

    def curve(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and values [points] of a metric, from the steps that have it."""
        rows = [(s["tokens"], s[metric]) for s in self.steps if s.get(metric) is not None]
        rows = rows[:: -(-len(rows) // _MOST_POINTS) or 1]
        tokens, values = zip(*rows, strict=True) if rows else ((), ())
        return np.array(tokens, float), np.array(values, float)

    def validation(self) -> dict[str, tuple[list[int], list[float]]]:
        """Return tokens and losses of each validation set by its name."""
        curves: dict[str, tuple[list[int], list[float]]] = {}
        for step in self.steps:
            for name, losses in step.get("validation", {}).items():
                tokens, values = curves.setdefault(name, ([], []))
                tokens.append(step["tokens"])
                values.append(losses["loss"])
        return curves

    def restarts(self) -> list[tuple[float, str]]:
        """Return the tokens at each later launch, and the new mesh if it changed, else ""."""
        launches = [event for event in self.events if event["event"] == "launch"]
        tokens = {step["step"]: step["tokens"] for step in self.steps}
        return [
            (tokens.get(new["step"], 0), "" if new["mesh"] == old["mesh"] else new["mesh"])
            for old, new in pairwise(launches)
        ]

    def memory(self) -> list[int]:
        """Return the peak memory of each rank in bytes at the last clean end; [] if unknown."""
        ends = [event["peak_memory_bytes"] for event in self.events if event["event"] == "end"]
        return ends[-1] if ends else []

    def measured(self, metric: str) -> float:
        """Return the median of a metric over the steps after the first, which also warms up."""
        values = [s[metric] for s in self.steps[1:] or self.steps if s.get(metric) is not None]
        return median(values) if values else float("nan")


def read(folder: Path) -> Run:
    """Read a run's folder; raise ConfigError if it has no config or no step."""
    try:
        config = RunConfig.from_json(folder / "config.json")
        steps = _lines(folder / "metrics.jsonl")
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}; name the folder of a run, such as runs/first"
        ) from None
    if not steps:
        raise ConfigError(f"{folder}/metrics.jsonl: has no step yet; wait for the first step")
    journal = folder / "events.jsonl"
    return Run(folder.name, config, steps, _lines(journal) if journal.exists() else [])


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file with one per line; a line that is cut off is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def planned(run: Run, name: str | None) -> Plan | None:
    """Return the plan of a run on `name`d or its own hardware; None if that is not described."""
    config, own = run.config, run.config.run.hardware
    if name is None and own == "auto":
        if hardware.THIS_MACHINE not in hardware.names():
            return None
        name = hardware.THIS_MACHINE
    machine: Hardware = hardware.load(name or own, "--hardware")
    assert config.mesh.dp != "auto", "the config in a run's folder is resolved"
    devices = config.mesh.pp * config.mesh.dp * config.mesh.tp
    return plan_rows.as_written(config, request_of(config, machine, devices))


def page(
    runs: Sequence[Run], plans: Sequence[Plan | None], samples: Mapping[str, Mapping[str, str]]
) -> tuple[str, dict[str, tuple[bytes, str]]]:
    """Return the page of runs, and its plots: name -> (PNG, caption).

    plans: of each run, or None. samples: run -> checkpoint -> generated text.
    """
    title = f"Run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs"
    drawn = pictures(runs, plans)
    body = [f"<h1>{escape(title)}</h1>", table(_results(runs)), *figures(drawn)]
    body += [table(_beside_plan(r, p)) for r, p in zip(runs, plans, strict=True)]
    if len(runs) > 1:
        body.append(table(_differences(runs)))
    for name, texts in samples.items():
        body.append(f"<h2>Samples of {escape(name)}</h2>")
        body += [f"<p>{escape(at)}</p><pre>{escape(text)}</pre>" for at, text in texts.items()]
    for run in runs:
        resolved = escape(json.dumps(run.config.to_public_dict(), indent=1))
        summary = f"<summary>{escape(run.name)}/config.json</summary>"
        body.append(f"<details>{summary}<pre>{resolved}</pre></details>")
    return html(title, body), drawn


def pictures(runs: Sequence[Run], plans: Sequence[Plan | None]) -> dict[str, tuple[bytes, str]]:
    """Draw losses, rates, speed and memory of the runs; return name -> (PNG, caption)."""
    at_restart = "; dotted lines mark restarts" if any(run.restarts() for run in runs) else ""
    with style() as plt:
        drawn = {
            "loss": (
                _losses(plt, runs),
                "Training loss (faint: each step, line: its moving average) and validation losses "
                f"(points), in nats per token{at_restart}",
            ),
            "rates": (
                _stacked(plt, runs, {"lr": "learning rate", "grad_norm": "gradient norm"}),
                "Learning rate, and global gradient norm before clipping",
            ),
            "speed": (
                _stacked(plt, runs, {"tokens_per_second": "tokens/s", "mfu": "MFU"}, plans),
                "Tokens per second of the whole mesh, and MFU"
                + ("; dashed: the plan" if any(plans) else ""),
            ),
        }
        if any(run.memory() for run in runs):
            drawn["memory"] = (
                _memory(plt, runs),
                "Peak memory of each rank, in MiB; lines: the plan for its pipeline coordinate",
            )
        return {name: (png(plt, figure), text) for name, (figure, text) in drawn.items()}


def _losses(plt: ModuleType, runs: Sequence[Run]) -> "Figure":
    figure, axes = plt.subplots()
    highest = []
    for run, color in zip(runs, _cycle(runs), strict=True):
        tokens, loss = run.curve("loss")
        axes.plot(tokens, loss, color=color, alpha=0.2, lw=0.7)
        smooth = _moving_average(loss)
        axes.plot(tokens, smooth, color=color, label=run.name if len(runs) > 1 else "training")
        highest.append(smooth[len(smooth) // 50 :].max())
        for mark, (name, (at, values)) in zip("oDs^vPX", run.validation().items(), strict=False):
            text = f"{run.name}, {name}" if len(runs) > 1 else name
            axes.plot(at, values, mark, ms=4, mfc="none", color=color, label=text)
        _mark_restarts(axes, run, color)
    axes.set_ylim(top=max(highest) * 1.02)
    axes.set(xlabel="tokens", ylabel="loss (nats per token)")
    axes.legend(ncols=1 + len(axes.get_legend_handles_labels()[1]) // 8)
    return figure


def _stacked(
    plt: ModuleType, runs: Sequence[Run], metrics: Mapping[str, str],
    plans: Sequence[Plan | None] = (),
) -> "Figure":  # fmt: skip
    """Draw metrics over tokens, one below the other; `plans` of the runs as dashed lines."""
    figure, rows = plt.subplots(len(metrics), 1, sharex=True, figsize=(6.4, 4.2))
    for axes, (metric, label) in zip(rows, metrics.items(), strict=True):
        for run, color in zip(runs, _cycle(runs), strict=True):
            axes.plot(*run.curve(metric), color=color, lw=0.9, label=run.name)
            _mark_restarts(axes, run, color)
        for plan, color in zip(plans, _cycle(plans), strict=True):
            if plan:
                value = plan.tokens_per_second
                value = (
                    value if metric == "tokens_per_second" else plan.mfu(plan.request.flops.full)
                )
                if value is not None:
                    axes.axhline(value, color=color, ls="--", lw=0.9)
        axes.set_ylabel(label)
        if metric != "lr":
            axes.set_ylim(bottom=0)
    if len(runs) > 1:
        rows[0].legend()
    rows[-1].set_xlabel("tokens")
    return figure


def _memory(plt: ModuleType, runs: Sequence[Run]) -> "Figure":
    figure, axes = plt.subplots()
    known = [(run, color) for run, color in zip(runs, _cycle(runs), strict=True) if run.memory()]
    width = 0.8 / len(known)
    for place, (run, color) in enumerate(known):
        measured, plan = run.memory(), _planned_memory(run)
        x = np.arange(len(measured)) + (place - (len(known) - 1) / 2) * width
        axes.bar(x, np.array(measured) / _MIB, width * 0.9, color=color, alpha=0.6, label=run.name)
        axes.hlines(np.array(plan) / _MIB, x - width / 2, x + width / 2, color=MARK, lw=1.5)
    axes.set(xlabel="rank", ylabel="MiB")
    axes.xaxis.get_major_locator().set_params(integer=True)
    if len(known) > 1:
        axes.legend()
    return figure


def _planned_memory(run: Run) -> list[int]:
    """Return the planned peak of each rank; ranks are numbered pp, dp, tp from the outermost."""
    setting = Setting.from_config(run.config)
    each = [memory.total + memory.host for memory in per_rank(setting)]
    ranks = len(run.memory())
    return [each[rank * setting.pp // ranks] for rank in range(ranks)]


def _mark_restarts(axes: "Axes", run: Run, color: str) -> None:
    for tokens, mesh in run.restarts():
        axes.axvline(tokens, color=color, ls=":", lw=0.9)
        if mesh:
            place = axes.get_xaxis_transform()
            axes.text(tokens, 1, f" {mesh}", color=color, fontsize=7, va="top", transform=place)


def _results(runs: Sequence[Run]) -> Part:
    rows: dict[str, list[str]] = {}
    for run in runs:
        last, launches = run.steps[-1], [e for e in run.events if e["event"] == "launch"]
        sets = {name: values[-1] for name, (_, values) in run.validation().items()}
        mfu = run.measured("mfu")
        cells = {
            "steps": f"{last['step']:,}", "tokens": f"{last['tokens']:,}",
            "training loss": f"{_moving_average(run.curve('loss')[1])[-1]:.4f}",
            **{f"loss of {name}": f"{loss:.4f}" for name, loss in sets.items()},
            "tokens/s": f"{run.measured('tokens_per_second'):,.0f}",
            "MFU": "-" if mfu != mfu else f"{100 * mfu:.1f} %",
            "launches": str(len(launches) or "-"),
            "mesh": launches[-1]["mesh"] if launches else "-",
        }  # fmt: skip
        for name, text in cells.items():
            rows.setdefault(name, ["-"] * len(runs))[runs.index(run)] = text
    heads = ("", *(run.name for run in runs))
    return Part("Results", heads, [(name, *cells) for name, cells in rows.items()])


def _beside_plan(run: Run, plan: Plan | None) -> Part:
    """Return the table of measured and planned seconds and bytes."""
    seconds, memory = run.measured("step_seconds"), max(run.memory(), default=0)
    rows = [("step, seconds", f"{seconds:.4g}", f"{plan.time.seconds:.4g}" if plan else "-")]
    for name, value in plan.time.parts.items() if plan else ():
        rows.append((f"of it {name}", "", f"{value:.4g}"))
    most = max(_planned_memory(run), default=0) if memory else 0
    if memory:
        rows.append(("fullest rank, MiB", f"{memory / _MIB:,.0f}", f"{most / _MIB:,.0f}"))
    title = f"{run.name} beside the plan"
    if plan is None:
        title += " (measure this machine with `parallel3d plan --calibrate`, or use --hardware)"
    return Part(title, ("", "measured", "plan"), rows)


def _differences(runs: Sequence[Run]) -> Part:
    """Return the table of settings in which the runs differ."""
    flat = [dict(_flat(run.config.to_public_dict())) for run in runs]
    names = dict.fromkeys(name for settings in flat for name in settings)
    rows = []
    for name in names:
        cells = [json.dumps(settings[name]) if name in settings else "-" for settings in flat]
        if len(set(cells)) > 1:
            rows.append((name.removeprefix("parallel3d."), *cells))
    return Part("Settings that differ", ("", *(run.name for run in runs)), rows[:_MOST_ROWS])


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    """Return path and value of each setting in nested sections."""
    rows: list[tuple[str, object]] = []
    for name, value in settings.items():
        path = f"{prefix}{name}"
        rows += _flat(value, f"{path}.") if isinstance(value, Mapping) else [(path, value)]
    return rows


def _moving_average(values: np.ndarray) -> np.ndarray:
    """Return the mean of each value and those before it, within a fiftieth of the curve."""
    window = max(1, len(values) // 50)
    sums = np.cumsum(np.concatenate([[0.0], values]))
    starts = np.maximum(np.arange(1, len(sums)) - window, 0)
    means: np.ndarray = (sums[1:] - sums[starts]) / (np.arange(1, len(sums)) - starts)
    return means


def _cycle(items: Sequence[object]) -> list[str]:
    return [_COLORS[i % len(_COLORS)] for i in range(len(items))]
