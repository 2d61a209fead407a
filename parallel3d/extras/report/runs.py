"""The report of training runs: curves, the plan beside what was measured, and what differs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle, groupby, pairwise
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from parallel3d.base import layer_ranges
from parallel3d.base.errors import ConfigError
from parallel3d.base.journal import STEP_PARTS
from parallel3d.base.mesh_sizes import WITHOUT_CP
from parallel3d.base.reader import flat
from parallel3d.base.step_lines import METRICS, closing_window, finite, read_lines
from parallel3d.config import CompleteConfig, RunConfig, hardware
from parallel3d.extras.report.page import Part, Plots, figures, html, png, style, table
from parallel3d.plan.memory.peak import per_rank
from parallel3d.plan.report import explain_run, plan_rows
from parallel3d.plan.report.plan_table import count
from parallel3d.plan.request import request_of
from parallel3d.plan.search.plans import Plan
from parallel3d.plan.setting import Setting, Workload

if TYPE_CHECKING:  # importing matplotlib takes a second
    from matplotlib.axes import Axes

_COLORS = ("#31276b", "#c0392b", "#1e8449", "#b9770e", "#2e86c1", "#7d3c98", "#616a6b", "#a04000")
_MIB = 2**20
Line = Mapping[str, Any]
"""A line of a run's metrics or journal."""
Plans = Sequence[Plan | str]
"""The plan of each run, or the reason why it has none."""


@dataclass(frozen=True)
class Run:
    """A run's folder: its name, its config, a dict per step, and its journal of launches."""

    name: str
    config: CompleteConfig
    steps: Sequence[Line]
    events: Sequence[Line]
    layers: Line | None = None
    """The newest record of what its layers did (`base/layer_ranges`); None if there is none."""

    def curve(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and values [points] of a metric, from the steps that have it."""
        rows = [(s["tokens"], s[metric]) for s in self.steps if s.get(metric) is not None]
        rows = rows[:: -(-len(rows) // 2000) or 1]  # at most 2,000 points
        tokens, values = zip(*rows, strict=True) if rows else ((), ())
        return np.array(tokens, float), np.array(values, float)

    def validation(self) -> dict[str, list[tuple[int, float]]]:
        """Return tokens and losses of each validation set by its name."""
        rows = [(step["tokens"], step.get("validation", {})) for step in self.steps]
        names = dict.fromkeys(name for _, sets in rows for name in sets)
        return {n: [(at, sets[n]["loss"]) for at, sets in rows if n in sets] for n in names}

    def scores(self) -> dict[str, list[tuple[int, float, float]]]:
        """Return steps, values and standard errors (or 0) of each "TASK, METRIC"."""
        curves: dict[str, list[tuple[int, float, float]]] = {}
        for step in self.steps:
            for task, metrics in step.get("scores", {}).items():
                for metric, value in metrics.items():
                    if value is not None and not metric.endswith("_stderr"):
                        error = metrics.get(f"{metric}_stderr") or 0.0
                        curves.setdefault(f"{task}, {metric}", []).append(
                            (step["step"], value, error)
                        )
        return curves

    @property
    def launches(self) -> list[Line]:
        """The events of its launches, oldest first; empty for a run without a journal."""
        return [event for event in self.events if event["event"] == "launch"]

    @property
    def newest_launch(self) -> Line:
        """The event of its newest launch; empty for a run without a journal."""
        return (self.launches or [{}])[-1]

    def restarts(self) -> list[tuple[float, str]]:
        """Return the tokens at each later launch, and the new mesh if it changed, else ""."""
        tokens = {step["step"]: step["tokens"] for step in self.steps}
        return [
            (tokens.get(new["step"], 0), "" if new["mesh"] == old["mesh"] else _mesh(new))
            for old, new in pairwise(self.launches)
        ]

    def memory(self) -> list[int]:
        """Return the peak memory of each rank in bytes at the last clean end; [] if unknown."""
        ends = [event["peak_memory_bytes"] for event in self.events if event["event"] == "end"]
        return ends[-1] if ends and self.events[-1]["event"] == "end" else []

    def measured(self, metric: str) -> float:
        """Return the median of a metric over the last launch without its first step.

        The first step also warms up. NaN if no step has the metric.
        """
        first = self.newest_launch.get("step", 0) + 2
        steps = [step for step in self.steps if step["step"] >= first] or self.steps
        values = [step[metric] for step in steps if step.get(metric) is not None]
        return median(values) if values else float("nan")


def _mesh(launch: Line) -> str:
    return str(launch["mesh"]).replace("x", "×")


def read(folder: Path) -> Run:
    """Read a run's folder; raise ConfigError if it has no config or no step."""
    try:
        # Without a file `from_json` would look among the shipped configs.
        (folder / "config.json").stat()
        config = RunConfig.from_json(str(folder / "config.json")).completed()
        steps = [finite(line) for line in read_lines(folder / METRICS) if _is_of_a_step(line)]
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}; name the folder of a run, such as runs/first"
        ) from None
    if not steps:
        raise ConfigError(f"{folder}/metrics.jsonl: has no loss yet; wait for the first step")
    if all(step.get("loss") is None for step in steps):
        raise ConfigError(
            f"{folder}/metrics.jsonl: has {len(steps):,} steps whose loss is not a number, and no "
            'other; docs/checkpoint.md, "When the loss goes wrong", says what to do'
        )
    journal = folder / "events.jsonl"
    events = read_lines(journal) if journal.exists() else []
    records = (folder / layer_ranges.FOLDER).glob("step-*.json")
    newest = max(records, key=lambda path: int(path.stem[len("step-") :]), default=None)
    layers = None if newest is None else json.loads(newest.read_text(encoding="utf-8"))
    return Run(folder.resolve().name, config, steps, events, layers)


def _is_of_a_step(line: Line) -> bool:
    """Return True for a line of ours; lines of other programs lack what a step of ours has."""
    return "tokens" in line and not isinstance(line.get("loss"), str)


def planned(run: Run, name: str | None) -> Plan | str:
    """Return the plan of a run, or the reason why it has none.

    - `name`: the hardware of the plan; None takes the config's, then the one that the run
      recognised, then this machine.

    Raises ConfigError for a name that is not known.
    """
    config = run.config
    if name is not None:
        hardware.load(name, "--hardware")
    own = config.run.hardware
    recognised = run.newest_launch.get("hardware") or hardware.THIS_MACHINE
    try:
        machine = hardware.load(name or (recognised if own == "auto" else own))
        return plan_rows.as_written(config, request_of(config, machine, config.mesh.sizes.ranks))
    except ConfigError as error:
        return str(error)


def page(
    runs: Sequence[Run], plans: Plans, samples: Mapping[str, Mapping[str, str]]
) -> tuple[str, Plots]:
    """Return the page of runs, and its plots.

    - `samples`: run -> checkpoint -> generated text.
    """
    title = f"Run {runs[0].name}" if len(runs) == 1 else f"Runs {', '.join(r.name for r in runs)}"
    drawn = pictures(runs, plans)
    body = [f"<h1>{escape(title)}</h1>", table(_results(runs))]
    if len(runs) > 1:
        body.append(table(_differences(runs)))
    body += ["<h2>Curves</h2>", *figures(drawn)]
    for run, plan in zip(runs, plans, strict=True):
        body.append(table(_beside_plan(run, plan)))
        if explained := explained_parts(run, plan):
            body.append(f"<p>{escape(explain_run.sentence(explained))}.</p>")
        if isinstance(plan, str):
            body.append(f"<p class=warn>The time is not planned: {escape(plan)}.</p>")
    for name, texts in samples.items():
        body.append(f"<h2>Text of {escape(name)}</h2>")
        body += [f"<p>{escape(at)}</p><pre>{escape(text)}</pre>" for at, text in texts.items()]
    body.append("<h2>Config</h2>")
    for run in runs:
        resolved = escape(json.dumps(run.config.to_public_dict(), indent=1))
        summary = f"<summary>{escape(run.name)}/config.json</summary>"
        body.append(f"<details>{summary}<pre>{resolved}</pre></details>")
    return html(title, body), drawn


def pictures(runs: Sequence[Run], plans: Plans) -> Plots:
    """Draw losses, rates, speed and memory of the runs."""
    at_restart = "; dotted lines mark restarts" if any(run.restarts() for run in runs) else ""
    dashed = "; dashed: the plan" if any(isinstance(plan, Plan) for plan in plans) else ""
    with style() as plt:
        plt.rcParams["figure.figsize"] = (5.4, 3.6)  # two fit beside each other
        drawn = {
            "loss": (
                _losses(plt, runs),
                "Training loss (faint: each step; line: moving average) and validation losses "
                f"(points), in nats per token{at_restart}",
            ),
            "speed": (
                _stacked(plt, runs, {"tokens_per_second": "tokens/s", "mfu": "MFU"}, plans),
                f"Tokens per second of the whole mesh, and MFU{dashed}",
            ),
            "rates": (
                _stacked(plt, runs, {"lr": "learning rate", "grad_norm": "gradient norm"}),
                "Learning rate, and global gradient norm before clipping",
            ),
        }
        if any(run.scores() for run in runs):
            drawn["scores"] = (
                _scores(plt, runs),
                "Scores on tasks over steps, with standard errors; one row for each metric",
            )
        if known := [run for run in runs if run.memory()]:
            caption = "Peak memory of each rank; black lines: the plan"
            if any(run.newest_launch.get("device") == "cpu" for run in known):
                caption += (
                    ". On a CPU it is the process's resident memory, which includes Python and its "
                    "libraries (some 400 MiB); the plan counts only tensors"
                )
            drawn["memory"] = _memory(plt, runs, plans), caption
        for run in runs:
            if run.layers:
                name = "layers" if len(runs) == 1 else f"layers-{run.name}"
                caption = (
                    f"Layers over the steps around step {run.layers['step']} of {run.name}, each "
                    "number relative to its layer's median (white: not finite, or not measured). "
                    f"{run.layers['reason']}: {layer_ranges.in_words(run.layers)}"
                )
                drawn[name] = _layers(plt, run.layers), caption
        return {name: (png(plt, figure), text) for name, (figure, text) in drawn.items()}


def _losses(plt: ModuleType, runs: Sequence[Run]) -> Any:
    figure, axes = plt.subplots()
    highest = []
    for run, color in zip(runs, cycle(_COLORS), strict=False):
        tokens, loss = run.curve("loss")
        axes.plot(tokens, loss, color=color, alpha=0.2, lw=0.7)
        smooth = _moving_average(loss)
        axes.plot(tokens, smooth, color=color, label=run.name if len(runs) > 1 else "training")
        highest.append(smooth[len(smooth) // 50 :].max())
        for mark, (name, points) in zip("oDs^vPX", run.validation().items(), strict=False):
            text = f"{run.name}, {name}" if len(runs) > 1 else name
            axes.plot(*zip(*points, strict=True), mark, ms=4, mfc="none", color=color, label=text)
        _mark_restarts(axes, run, color)
    axes.set_ylim(top=max(highest) * 1.02)
    axes.set(xlabel="tokens", ylabel="loss (nats per token)")
    axes.xaxis.set_major_formatter(_tick)
    axes.legend(ncols=1 + len(axes.get_legend_handles_labels()[1]) // 8)
    return figure


def _scores(plt: ModuleType, runs: Sequence[Run]) -> Any:
    """Draw the scores of all tasks, those of one metric in one row: their scales differ."""
    each = [(run, name, points) for run in runs for name, points in run.scores().items()]
    metrics = list(dict.fromkeys(name.rpartition(", ")[2] for _, name, _ in each))
    size = (5.4, 1.2 + 1.6 * len(metrics))
    figure, grid = plt.subplots(len(metrics), 1, sharex=True, squeeze=False, figsize=size)
    for axes, metric in zip(grid[:, 0], metrics, strict=True):
        own = [row for row in each if row[1].rpartition(", ")[2] == metric]
        for (run, name, points), color in zip(own, cycle(_COLORS), strict=False):
            steps, values, errors = zip(*points, strict=True)
            task = name.rpartition(", ")[0]
            label = f"{run.name}, {task}" if len(runs) > 1 else task
            axes.errorbar(steps, values, errors, marker="o", ms=3, color=color, label=label)
        axes.set_ylabel(metric)
        axes.legend()
    grid[-1, 0].set_xlabel("steps")
    return figure


def _stacked(
    plt: ModuleType,
    runs: Sequence[Run],
    metrics: Mapping[str, str],
    plans: Plans = (),
) -> Any:
    """Draw metrics over tokens, one below the other; `plans` of the runs as dashed lines."""
    figure, rows = plt.subplots(len(metrics), 1, sharex=True)
    for axes, (metric, label) in zip(rows, metrics.items(), strict=True):
        for run, color in zip(runs, cycle(_COLORS), strict=False):
            axes.plot(*run.curve(metric), color=color, lw=0.9, label=run.name)
            _mark_restarts(axes, run, color, named=axes is rows[0])
        for plan, color in zip(plans, cycle(_COLORS), strict=False):
            if not isinstance(plan, Plan):
                continue
            mfu = plan.mfu(plan.request.flops.full)
            if (value := mfu if metric == "mfu" else plan.tokens_per_second) is not None:
                axes.axhline(value, color=color, ls="--", lw=0.9)
        axes.set_ylabel(label)
        if metric != "lr":
            axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:.1%}" if metric == "mfu" else _tick)
    if len(runs) > 1:
        rows[0].legend()
    rows[-1].set_xlabel("tokens")
    rows[-1].xaxis.set_major_formatter(_tick)
    return figure


def _tick(value: float, place: object) -> str:
    """Return a tick's label for matplotlib, which also tells its place."""
    return count(value)


def _memory(plt: ModuleType, runs: Sequence[Run], plans: Plans) -> Any:
    figure, axes = plt.subplots()
    known = [row for row in zip(runs, plans, cycle(_COLORS), strict=False) if row[0].memory()]
    width = 0.8 / len(known)
    for place, (run, plan, color) in enumerate(known):
        measured = run.memory()
        x = np.arange(len(measured)) + (place - (len(known) - 1) / 2) * width
        axes.bar(x, np.array(measured) / _MIB, width * 0.9, color=color, alpha=0.6, label=run.name)
        if forecast := _planned_memory(run, plan):
            ends = x - width / 2, x + width / 2
            axes.hlines(np.array(forecast) / _MIB, *ends, color="black", lw=1.5)
    axes.set(xlabel="rank", ylabel="MiB")
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    if len(known) > 1:
        axes.set_ylim(top=1.25 * axes.get_ylim()[1])  # room for the legend
        axes.legend()
    return figure


def _layers(plt: ModuleType, record: Line) -> Any:
    """Draw each layer's numbers over the steps of a record, as factors of the layer's median."""
    figure, rows = plt.subplots(len(layer_ranges.QUANTITIES), 1, sharex=True, figsize=(5.4, 6.4))
    steps = record["steps"]
    for axes, (name, quantity) in zip(rows, layer_ranges.QUANTITIES.items(), strict=True):
        values = np.array(record[name], float).T  # [layers, steps]; None is NaN
        usual = np.nanmedian(values, axis=1)
        factors = values / np.where(usual > 0, usual, np.nan)[:, None]
        extent = (steps[0] - 0.5, steps[-1] + 0.5, len(values) - 0.5, -0.5)
        options = {"norm": "log", "vmin": 0.1, "vmax": 10, "cmap": "coolwarm"}
        image = axes.imshow(
            np.clip(factors, 0.1, None),
            aspect="auto",
            extent=extent,
            interpolation="none",
            **options,
        )
        axes.axvline(record["step"], color="black", ls=":", lw=0.9)
        axes.set_title(quantity.title)
        axes.grid(visible=False)
        every = -(-len(values) // 8)
        axes.set_yticks(range(0, len(values), every), record["layers"][::every])
        figure.colorbar(image, ax=axes)
    rows[-1].set_xlabel("step")
    return figure


def _planned_memory(run: Run, plan: Plan | str) -> list[int]:
    """Return the planned peak of each rank, of what `Run.memory` counts; [] if it is unknown.

    Ranks are numbered pp, dp, cp, tp from the outermost axis to the innermost.
    """
    setting = Setting.from_config(run.config)
    if run.newest_launch.get("device", "cpu") == "cpu":
        each = [memory.total + memory.host for memory in per_rank(setting)]
    elif isinstance(plan, Plan):
        planned_memory = per_rank(setting, plan.request.hardware)
        # torch's allocator does not see what the margin is for.
        each = [memory.total - memory.parts["margin"] for memory in planned_memory]
    else:
        return []
    ranks = len(run.memory())
    return [each[rank * setting.mesh.pp // ranks] for rank in range(ranks)]


def _mark_restarts(axes: "Axes", run: Run, color: str, named: bool = True) -> None:
    """Draw a line at each restart, with the mesh if it changed and if `named`."""
    for tokens, mesh in run.restarts():
        axes.axvline(tokens, color=color, ls=":", lw=0.9)
        if mesh and named:
            axes.text(
                tokens,
                1,
                f" {mesh}",
                color=color,
                fontsize=7,
                va="top",
                transform=axes.get_xaxis_transform(),
            )


def _results(runs: Sequence[Run]) -> Part:
    rows: dict[str, list[str]] = {}
    for place, run in enumerate(runs):
        last = run.steps[-1]
        launches = run.launches
        mfu = run.measured("mfu")
        sets = {name: points[-1][1] for name, points in run.validation().items()}
        known = launches or [{"mesh": run.config.mesh.sizes}]  # older runs have no journal
        meshes = [mesh for mesh, _ in groupby(map(_mesh, known))]  # without repetitions
        size = count(Workload.of(run.config).num_params)
        cells = {
            "model, parameters": f"{run.config.model.family}, {size}",
            "steps": f"{last['step']:,} of {run.config.num_steps:,}",
            "tokens": count(last["tokens"]),
            "training loss": f"{_last_losses(run).mean():.4f}",
            **{f"loss of {name}": f"{loss:.4f}" for name, loss in sets.items()},
            **{name: f"{points[-1][1]:.4f}" for name, points in run.scores().items()},
            "tokens/s": f"{run.measured('tokens_per_second'):,.0f}",
            "MFU": "-" if mfu != mfu else f"{100 * mfu:.1f} %",
            f"mesh, {'×'.join(WITHOUT_CP)}": " → ".join(meshes),
            "launches": str(len(launches) or "-"),
        }
        for name, text in cells.items():
            rows.setdefault(name, ["-"] * len(runs))[place] = text
    heads = ("", *(run.name for run in runs))
    return Part("Results", heads, [(name, *cells) for name, cells in rows.items()])


def _beside_plan(run: Run, plan: Plan | str) -> Part:
    """Return the table of measured and planned seconds and bytes."""
    known = plan if isinstance(plan, Plan) else None
    where = f" for {known.request.hardware.name}" if known else ""
    pairs: list[tuple[str, float | None, float | None]] = [
        ("step, s", run.measured("step_seconds"), known.time.seconds if known else None)
    ]
    explained = explained_parts(run, plan)
    if explained:
        pairs += [(f"· {name}", *both) for name, both in explained.seconds.items() if any(both)]
    elif known:
        pairs += [(f"· {name}", None, part) for name, part in known.time.parts.items() if part]
    if memory := run.memory():
        forecast = _planned_memory(run, plan)
        most = max(forecast) / _MIB if forecast else None
        pairs.append(("fullest rank, MiB", max(memory) / _MIB, most))
    if all(planned is None for *_, planned in pairs):
        measured_rows = [(name, _in_short(measured)) for name, measured, _ in pairs]
        return Part(f"{run.name}, measured", ("", "measured"), measured_rows)
    rows = [(name, _in_short(measured), _in_short(planned)) for name, measured, planned in pairs]
    return Part(f"{run.name} beside the plan{where}", ("", "measured", "plan"), rows)


def explained_parts(run: Run, plan: Plan | str) -> explain_run.Explanation | None:
    """Return the run's step beside its plan, part by part; None without parts or a plan."""
    recorded = [event["ranks"] for event in run.events if event["event"] == STEP_PARTS]
    if not recorded or isinstance(plan, str):
        return None
    return explain_run.explain_run(plan, recorded[-1])


def _last_losses(run: Run) -> np.ndarray:
    """Return the losses whose mean a run prints at its end: of the last steps of its launch."""
    losses: np.ndarray = run.curve("loss")[1]
    begin = int(run.newest_launch.get("step", 0))
    trained = max(1, int(run.steps[-1]["step"]) - begin)
    return losses[-min(closing_window(run.config.num_steps), trained) :]


def _in_short(number: float | None) -> str:
    if number is None:
        return ""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _differences(runs: Sequence[Run]) -> Part:
    """Return the table of settings in which the runs differ."""
    each = [flat(run.config.to_public_dict()) for run in runs]
    names = dict.fromkeys(name for settings in each for name in settings)
    rows = []
    for name in names:
        cells = [json.dumps(settings[name]) if name in settings else "-" for settings in each]
        if len(set(cells)) > 1 and name != "parallel3d.run.name":
            rows.append((name.removeprefix("parallel3d."), *cells))
    return Part("Settings that differ", ("", *(run.name for run in runs)), rows)


def _moving_average(values: np.ndarray) -> np.ndarray:
    """Return the mean of each value and those before it, within a fiftieth of the curve."""
    window = max(1, len(values) // 50)
    sums = np.cumsum(np.concatenate([[0.0], values]))
    starts = np.maximum(np.arange(1, len(sums)) - window, 0)
    means: np.ndarray = (sums[1:] - sums[starts]) / (np.arange(1, len(sums)) - starts)
    return means
