"""The planner checked against published runs, for launch/plan.py --validate FILE.

Each group of sources is predicted with curves that were fitted on the other groups only, and so are
the two baselines beside it: a constant efficiency, and a look-up of the runs most alike.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.published import fits
from benchmarks.published.cells import QUESTIONS
from benchmarks.published.memory_compared import validate_memory
from benchmarks.published.neighbours import Lookup, RunFigures, development
from benchmarks.published.rows import LeftOut, PublishedRun, read
from benchmarks.published.statistics import Choice, constants, errors, rank_correlation, regrets
from benchmarks.published.validation_tables import show
from parallel3d.base.errors import ConfigError
from parallel3d.config.hardware import Hardware
from parallel3d.plan.setting import Setting
from parallel3d.plan.time.operators import Curves
from parallel3d.plan.time.step import step_time

__all__ = ["Outcome", "outcomes", "overall", "show", "summary", "validate"]

Predict = Callable[[Setting, Hardware, Curves], float]
MEANS = ("mean_error", "bias", "constant_mean_error", "neighbour_mean_error", "mesh_regret")


@dataclass(frozen=True)
class Outcome:
    """A row, and the step seconds predicted for it by the planner and by two baselines."""

    row: PublishedRun
    run: RunFigures
    predicted: float
    constant: float | None
    neighbour: float | None

    @property
    def measured(self) -> float:
        """Measured seconds of the row's step."""
        assert self.row.seconds is not None
        return self.row.seconds


def validate(path: Path | str, program: str | None = None) -> dict[str, Any]:
    """The planner's errors on a table of published runs, by source, by group and over all.

    `program`: what the rows ran where neither table nor source say it. All errors are fractions of
    the measured value; what cannot be said is None. Raises ConfigError where the table cannot be
    read, or the program is not known.
    """
    everything, left_out = read(path, program)
    refused: list[LeftOut] = []
    rows = [row for row in everything if not row.has_experts]
    sparse = [row for row in everything if row.has_experts]
    found = outcomes(rows, fits.without, refused=refused)
    of_experts = outcomes(sparse, fits.without, _without_device, refused)
    lines = {out.line for out in refused}
    rows = [row for row in rows if row.line not in lines]
    lost = "it ran out of memory"
    no_time = [LeftOut(r.line, r.source, lost, lost) for r in everything if r.seconds is None]
    left_out = sorted([*left_out, *refused, *no_time])
    sources = list(dict.fromkeys([row.source for row in rows] + [out.source for out in left_out]))
    groups = {
        name: summary([o for o in found if o.row.group == name])
        for name in dict.fromkeys(outcome.row.group for outcome in found)
    }
    return {
        "sources": {
            name: summary([o for o in found if o.row.source == name])
            | {"left_out": sum(out.source == name for out in left_out)}
            for name in sources
        },
        "groups": groups,
        "overall": overall(groups, summary(found)) | {"left_out": len(left_out)},
        "experts": _by_model(of_experts),
        "memory": validate_memory(rows),
        "assumed": _assumed([outcome.row for outcome in found]),
        "rows": _rows([*found, *of_experts]),
        "left_out": [
            {"row": out.line, "source": out.source, "reason": out.reason, "rule": out.rule}
            for out in left_out
        ],
        "asked": _asked(left_out),
    }


def _without_device(setting: Setting, hardware: Hardware, _: Curves) -> float:
    """The seconds of a step with experts, whose time was fitted on the rows of other devices."""
    return step_time(setting, hardware, fits.without_device(hardware.name)).seconds


def _by_model(found: Sequence[Outcome]) -> dict[str, Any]:
    """The lines of models with experts, of each number format, and of all their rows."""
    lines = {}
    for name in dict.fromkeys(outcome.row.model for outcome in found):
        lines[name] = summary([o for o in found if o.row.model == name])
    for name in dict.fromkeys(outcome.row.setting.workload.precision for outcome in found):
        lines[name] = summary([o for o in found if o.row.setting.workload.precision == name])
    return lines | ({"all, by row": summary(found)} if found else {})


def _asked(left_out: Sequence[LeftOut]) -> dict[str, Any]:
    """column -> what to write into it, and the rows that would then be used, once for the table."""
    lines = {name: [out.line for out in left_out if name in out.asks] for name in QUESTIONS}
    return {
        name: {"write": QUESTIONS[name], "rows": len(own), "lines": own}
        for name, own in lines.items()
        if own
    }


def outcomes(
    rows: Sequence[PublishedRun],
    curves_without: Callable[[str], Curves],
    predict: Predict = lambda setting, hardware, curves: (
        step_time(setting, hardware, curves).seconds
    ),
    refused: list[LeftOut] | None = None,
) -> list[Outcome]:
    """Every row that has a measured time, predicted with curves that never saw its group.

    A row that the planner refuses is added to `refused`; without one, raises its ConfigError.
    """
    predicted: list[tuple[PublishedRun, RunFigures, float]] = []
    for row in rows:
        if row.seconds is None:
            continue
        try:
            seconds = predict(row.setting, row.hardware, curves_without(row.group))
        except ConfigError as problem:
            if refused is None:
                raise
            refused.append(LeftOut.of(row.line, row.source, problem))
        else:
            predicted.append((row, RunFigures.of(row), seconds))
    share = _constants([run for _, run, _ in predicted])
    lookups = {group: Lookup(group) for group in {row.group for row, _, _ in predicted}}
    return [
        Outcome(row, run, seconds, share(run), lookups[row.group].seconds(run))
        for row, run, seconds in predicted
    ]


def _constants(runs: Sequence[RunFigures]) -> Callable[[RunFigures], float | None]:
    """A run's seconds by the constant efficiency of the other groups: the table's, and those of
    the development runs that the table has not."""
    groups = {run.group for run in runs}
    everything = [*runs, *(run for run in development() if run.group not in groups)]
    found = constants((r.group, r.device, _ideal(r) / r.seconds) for r in everything)

    def seconds(run: RunFigures) -> float | None:
        share = found.get((run.group, run.device))
        return None if share is None else _ideal(run) / share

    return seconds


def _ideal(run: RunFigures) -> float:
    """Seconds of a step at the peak, recomputation included."""
    return run.hardware_flops / run.peak_flops


def summary(found: Sequence[Outcome]) -> dict[str, Any]:
    """One line of the table of errors, in which each row counts once.

    `rank_correlation` is of the seconds of a step, `flops_rank_correlation` of the model FLOP/s of
    a device, which large and small models have in common.
    """
    predicted = [outcome.predicted for outcome in found]
    measured = [outcome.measured for outcome in found]
    own = errors(predicted, measured)
    regret = regrets(_choice(outcome) for outcome in found)
    return {
        "rows": len(found),
        "mean_error": own.mean if own else None,
        "worst_error": own.worst if own else None,
        "bias": own.bias if own else None,
        "constant_mean_error": _mean_error((o.constant, o.measured) for o in found),
        "neighbour_mean_error": _mean_error((o.neighbour, o.measured) for o in found),
        "rank_correlation": rank_correlation(predicted, measured),
        "flops_rank_correlation": rank_correlation(
            [o.run.model_flops / o.predicted for o in found],
            [o.run.model_flops / o.measured for o in found],
        ),
        "mesh_regret": sum(regret) / len(regret) if regret else None,
        "mesh_sets": len(regret),
    }


def _mean_error(pairs: Iterable[tuple[float | None, float]]) -> float | None:
    """The mean error of a baseline over the rows for which it has one."""
    known = [(baseline, measured) for baseline, measured in pairs if baseline is not None]
    found = errors([baseline for baseline, _ in known], [measured for _, measured in known])
    return found.mean if found else None


def overall(groups: Mapping[str, Mapping[str, Any]], by_row: Mapping[str, Any]) -> dict[str, Any]:
    """The line over all rows: means over the groups, each of which counts once.

    The worst row and the ranks are over all rows; `by_row` has all by row, and the regret by set.
    """
    line = dict(by_row)
    for name in MEANS:
        known = [group[name] for group in groups.values() if group[name] is not None]
        line[name] = sum(known) / len(known) if known else None
    return line | {"groups": len(groups), "by_row": dict(by_row)}


def _choice(outcome: Outcome) -> Choice:
    """Devices, model, batch and number format are the task; the rest is how it was done."""
    row = outcome.row
    setting = outcome.row.setting
    task = (
        row.source,
        row.gpu,
        row.model,
        id(setting.workload.layers),
        setting.mesh.ranks,
        setting.global_batch_size,
        setting.workload.precision,
    )
    pp, dp, cp, tp = setting.mesh
    mesh = (pp, dp, tp, cp, setting.state.zero_stage)
    way = (
        mesh,
        setting.order.stages_per_rank,
        setting.flow.micro_batch,
        setting.workload.seq,
        setting.flow.recompute,
        setting.recomputed_share,
        setting.state.offload_optimizer,
        setting.state.offload_param,
        setting.workload.software.name,
    )
    return Choice(task, mesh, way, outcome.predicted, outcome.measured)


def _assumed(rows: Sequence[PublishedRun]) -> dict[str, Any]:
    """column -> in how many rows a blank was filled, and how often with what."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        for name, value in row.assumed.items():
            column = found.setdefault(name, {"rows": 0, "values": {}})
            column["rows"] += 1
            column["values"][str(value)] = column["values"].get(str(value), 0) + 1
    return dict(sorted(found.items(), key=lambda item: -item[1]["rows"]))


def _rows(found: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Every row with what each figure of the report is computed from.

    Rows of one `task` were asked the same, those of one `way` did it alike: numbers that tell equal
    from unequal. `model_flops`: of a device in a step.
    """
    tasks: dict[Hashable, int] = {}
    ways: dict[Hashable, int] = {}
    lines = []
    for outcome in found:
        choice = _choice(outcome)
        setting = outcome.row.setting
        sizes = setting.mesh
        mesh = (f"pp{sizes.pp}", f"dp{sizes.dp}", f"tp{sizes.tp}", f"cp{sizes.cp}")
        lines.append(
            {
                "row": outcome.row.line,
                "source": outcome.row.source,
                "group": outcome.row.group,
                "model": outcome.row.model,
                "gpu": outcome.row.gpu,
                "devices": setting.mesh.ranks,
                "ep": setting.flow.ep,
                "measured": outcome.measured,
                "predicted": outcome.predicted,
                "constant": outcome.constant,
                "neighbour": outcome.neighbour,
                "assumed": dict(outcome.row.assumed),
                "model_flops": outcome.run.model_flops,
                "task": tasks.setdefault(choice.task, len(tasks)),
                "mesh": " ".join((*mesh, f"zero{setting.state.zero_stage}")),
                "way": ways.setdefault(choice.way, len(ways)),
            }
        )
    return lines
