"""The planner against published runs: launch/plan.py --validate FILE (floor 0).

Each group of sources is predicted with curves that were fitted on the other groups only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel3d.hardware import Hardware
from parallel3d.plan.setting import Setting
from parallel3d.plan.time import curves
from parallel3d.plan.time.operators import Curves
from parallel3d.plan.time.step import step_time
from parallel3d.published.flops import hardware_flops, model_flops, peak_of
from parallel3d.published.rows import LeftOut, Row, read
from parallel3d.published.statistics import Choice, constants, errors, rank_correlation, regrets
from parallel3d.published.table import show

__all__ = ["Outcome", "outcomes", "show", "summary", "validate"]

Predict = Callable[[Setting, Hardware, Curves], float]


@dataclass(frozen=True)
class Outcome:
    """A row and what was predicted of it: by the planner, and by a constant efficiency."""

    row: Row
    predicted: float
    constant: float | None

    @property
    def measured(self) -> float:
        """Seconds of a step."""
        assert self.row.seconds is not None
        return self.row.seconds


def validate(path: Path | str) -> dict[str, Any]:
    """The planner's errors on a table of published runs, by source, by group and over all.

    All errors are fractions of the measured value; what cannot be said is None. Raises ConfigError
    where the table cannot be read.
    """
    rows, left_out = read(path)
    found = outcomes(rows, curves.without)
    sources = list(dict.fromkeys([row.source for row in rows] + [out.source for out in left_out]))
    groups = list(dict.fromkeys(outcome.row.group for outcome in found))
    no_time = [LeftOut(r.line, r.source, "it ran out of memory") for r in rows if r.seconds is None]
    left_out = sorted([*left_out, *no_time])
    return {
        "sources": {
            name: summary(
                [outcome for outcome in found if outcome.row.source == name],
                sum(out.source == name for out in left_out),
            )
            for name in sources
        },
        "groups": {
            name: summary([outcome for outcome in found if outcome.row.group == name], None)
            for name in groups
        },
        "overall": summary(found, len(left_out)),
        "memory": _memory(rows),
        "left_out": [
            {"row": out.line, "source": out.source, "reason": out.reason} for out in left_out
        ],
    }


def outcomes(
    rows: Sequence[Row],
    curves_without: Callable[[str], Curves],
    predict: Predict = lambda setting, hardware, curves: (
        step_time(setting, hardware, curves).seconds
    ),
) -> list[Outcome]:
    """Every row that has a measured time, predicted with curves that never saw its group."""
    timed = [row for row in rows if row.seconds is not None]
    constant = constants((row.group, _device(row), _efficiency(row)) for row in timed)
    found = []
    for row in timed:
        share = constant.get((row.group, _device(row)))
        found.append(
            Outcome(
                row,
                predict(row.setting, row.hardware, curves_without(row.group)),
                None if share is None else _ideal(row) / share,
            )
        )
    return found


def _device(row: Row) -> tuple[str, bool]:
    """What the constant is of: a chip, and whether it computes in eight bits."""
    return row.chip, row.setting.precision == "fp8"


def _ideal(row: Row) -> float:
    """Seconds of a step at the peak, recomputation included."""
    setting = row.setting
    peak = peak_of(row.hardware, setting.precision) * setting.devices
    return hardware_flops(setting) / peak


def _efficiency(row: Row) -> float:
    assert row.seconds is not None
    return _ideal(row) / row.seconds


def summary(found: Sequence[Outcome], left_out: int | None) -> dict[str, Any]:
    """One line of the table.

    `rank_correlation` is of the seconds of a step, `flops_rank_correlation` of the model FLOP/s of
    a device, which large and small models have in common.
    """
    predicted = [outcome.predicted for outcome in found]
    measured = [outcome.measured for outcome in found]
    own = errors(predicted, measured)
    known = [(o.constant, o.measured) for o in found if o.constant is not None]
    constant = errors([c for c, _ in known], [m for _, m in known])
    regret = regrets(_choice(outcome) for outcome in found)
    line: dict[str, Any] = {
        "rows": len(found),
        "mean_error": own.mean if own else None,
        "worst_error": own.worst if own else None,
        "bias": own.bias if own else None,
        "constant_mean_error": constant.mean if constant else None,
        "rank_correlation": rank_correlation(predicted, measured),
        "flops_rank_correlation": rank_correlation(
            [_flops(o) / o.predicted for o in found], [_flops(o) / o.measured for o in found]
        ),
        "mesh_regret": sum(regret) / len(regret) if regret else None,
        "mesh_sets": len(regret),
    }
    if left_out is not None:
        line["left_out"] = left_out
    return line


def _flops(outcome: Outcome) -> float:
    """Model FLOPs of a device in a step: over seconds, the efficiency, whatever the size."""
    return model_flops(outcome.row.setting) / outcome.row.setting.devices


def _choice(outcome: Outcome) -> Choice:
    """Devices, model, batch and number format are the task; the rest is how it was done."""
    row, setting = outcome.row, outcome.row.setting
    task = (
        row.source,
        row.gpu,
        row.model,
        id(setting.layers),
        setting.devices,
        setting.global_batch_size,
        setting.precision,
    )
    mesh = (setting.pp, setting.dp, setting.tp, setting.cp, setting.zero_stage)
    way = (
        mesh,
        setting.stages_per_rank,
        setting.shape,
        setting.recompute,
        setting.recomputed_share,
        setting.offload_optimizer,
        setting.offload_param,
        setting.software.name,
    )
    return Choice(task, mesh, way, outcome.predicted, outcome.measured)


def _memory(rows: Sequence[Row]) -> dict[str, Any]:
    from parallel3d.published.memory import validate_memory

    found: dict[str, Any] = validate_memory(rows)
    return found
