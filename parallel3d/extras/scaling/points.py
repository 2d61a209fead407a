"""Points of a fit, with the rows that were dropped, and the result of the fit in fit.json."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallel3d.base import reader
from parallel3d.base.errors import ConfigError
from parallel3d.base.reader import JsonObject
from parallel3d.extras.scaling.runs import Table, number

Array = npt.NDArray[np.float64]
Interval = list[float] | None
"""The percentiles 2.5 and 97.5 of draws; None without draws."""
FLOPS_PER_ND = 6
"""C = 6ND: FLOPs of forward and backward pass (arXiv:2001.08361, section 2.1)."""
_COLUMNS = ("params", "tokens", "flops", "loss")
SAME = 1e-3  # relative difference below which sizes, or numbers of tokens, count as equal
SAME_BUDGET = 0.05  # the same for budgets, which differ because runs end with a whole step
USES = {
    "params": (
        "--n-column",
        "number of parameters",
        ("params", "n", "N", "n_params", "num_params", "parameters", "with_head"),
    ),
    "tokens": (
        "--d-column",
        "training tokens",
        ("tokens", "d", "D", "n_tokens", "num_tokens", "training_tokens"),
    ),
    "flops": ("--flops-column", "training FLOPs", ("flops", "c", "C", "compute", "training_flops")),
    "loss": (
        "--loss-column",
        "loss in nats per token",
        ("loss", "held_out_loss", "val_loss", "validation_loss", "final_loss"),
    ),
    "standard_error": (
        "--error-column",
        "standard error of the loss",
        ("held_out_standard_error",),
    ),
    "unique": ("--unique-column", "unique training tokens", ("corpus_unique_tokens",)),
}
"""Use of a column -> its flag, its meaning, and its usual names, tried in this order unless the
flag names the column."""


class Dropped(NamedTuple):
    """A row that is left out of the fit, and the reason."""

    row: str
    reason: str


@dataclass(frozen=True)
class Points:
    """Sizes, tokens, FLOPs and losses (nats per token) of runs, as arrays [points].

    - `names`: names of the rows, as `Table.names`.
    - `columns`: use -> column of the table ("params" -> "n").
    - `unique`: unique training tokens.
    - `others`: further columns by name.
    """

    params: Array
    tokens: Array
    flops: Array
    loss: Array
    names: tuple[str, ...]
    columns: Mapping[str, str]
    dropped: tuple[Dropped, ...] = ()
    standard_error: Array | None = None
    unique: Array | None = None
    others: Mapping[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.loss)

    def take(self, rows: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> "Points":
        """Return the points at `rows`, indices or a mask."""
        index = np.arange(len(self))[rows]
        arrays: dict[str, Any] = {
            k: v[index] for k, v in vars(self).items() if isinstance(v, np.ndarray)
        }
        others = {name: values[index] for name, values in self.others.items()}
        names = tuple(self.names[i] for i in index)
        return replace(self, names=names, others=others, **arrays)

    def without(self, reasons: Mapping[int, str]) -> "Points":
        """Drop points; `reasons` maps their indices to the reason to list."""
        gone = [Dropped(self.names[i], reason) for i, reason in reasons.items()]
        rest = self.take(np.array([i not in reasons for i in range(len(self))], dtype=bool))
        return replace(rest, dropped=(*self.dropped, *gone))

    @property
    def known_unique(self) -> Array:
        """Unique training tokens; all tokens, if these are not known."""
        return self.tokens if self.unique is None else self.unique

    @property
    def digest(self) -> str:
        """SHA-256 of the sizes, tokens, FLOPs and losses, independent of the order of points."""
        columns = (self.params, self.tokens, self.flops, self.loss)
        lines = sorted(" ".join(map(repr, row)) for row in np.column_stack(columns).tolist())
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def groups(values: Array, same: float = SAME) -> list[np.ndarray]:
    """Group the indices of values that differ by less than `same` (relative), in ascending order.

    Neighbours in sorted order are compared, so a group may span more than `same`.
    """
    order = np.argsort(values, kind="stable")
    cuts = np.flatnonzero(np.diff(np.log(values[order])) > same) + 1
    return np.split(order, cuts)


def points_of(
    table: Table,
    named: Mapping[str, str | None],
    *,
    others: Sequence[str] = (),
    drop_largest: int = 0,
) -> Points:
    """Return the points of a table; rows that cannot be used are listed as dropped.

    - `named`: use -> name of the column, or None for the usual names. Two of params, tokens and
      flops are enough.
    - `others`: further columns to read, with numbers above 0.
    - `drop_largest`: number of largest losses to drop.

    Raises ConfigError if a column is missing or no row can be used.
    """
    columns = _columns(table, named)
    read = columns | {f"other {name}": table.column(name, "--setting-column") for name in others}
    dropped = [Dropped(*gone) for gone in table.left_out]
    rows = []
    names = []
    for name, cells in zip(table.names, table.rows, strict=True):
        row, reason = _numbers(read, cells)
        if reason:
            dropped.append(Dropped(name, reason))
        else:
            rows.append(row)
            names.append(name)
    if not rows:
        why = f"; {dropped[0].row}: {dropped[0].reason}" if dropped else ""
        raise ConfigError(f"{table.path}: no row can be used{why}; correct the table")
    arrays = {use: np.array([row[use] for row in rows]) for use in rows[0]}
    points = Points(
        **{use: arrays[use] for use in _COLUMNS},
        names=tuple(names),
        columns=columns,
        dropped=tuple(dropped),
        standard_error=arrays.get("standard_error"),
        unique=arrays.get("unique"),
        others={name: arrays[f"other {name}"] for name in others},
    )
    points = points.without(_repeats(np.column_stack(list(arrays.values())), names))
    points = points.without(_diverged(points))
    largest = sorted(np.argsort(-points.loss, kind="stable")[:drop_largest].tolist())
    rule = f"one of the {drop_largest} largest losses (--drop-largest-losses)"
    return points.without({i: f"loss {points.loss[i]:g}: {rule}" for i in largest})


def _columns(table: Table, named: Mapping[str, str | None]) -> dict[str, str]:
    columns = {}
    for use, (flag, _, names) in USES.items():
        if name := named.get(use):
            columns[use] = table.column(name, flag)
        elif usual := [name for name in names if name in table.columns]:
            columns[use] = usual[0]
    if "loss" not in columns:
        raise ConfigError(
            f"--loss-column: is missing, and {table.path} has no column loss; use "
            f"one of its columns: {', '.join(table.columns)}"
        )
    known = sorted(columns.keys() & {"params", "tokens", "flops"})
    if len(known) < 2:
        raise ConfigError(
            f"{table.path}: two columns of parameters, tokens and FLOPs are needed, found only: "
            f"{', '.join(known) or 'none'}; name columns with --n-column, --d-column or "
            f"--flops-column; the table has: {', '.join(table.columns)}"
        )
    return columns


def _numbers(
    columns: Mapping[str, str], cells: Mapping[str, object]
) -> tuple[dict[str, float], str]:
    """Return the numbers of a row, with the missing one of N, D and C computed by C = 6ND.

    The text is the reason why the row cannot be used, or "".
    """
    numbers: dict[str, float] = {}
    for use, column in columns.items():
        value = number(cells.get(column))
        if value is None or not 0 < value < math.inf:
            return {}, f"{column} = {cells.get(column)!r} is not a finite number above 0"
        numbers[use] = value
    if "flops" not in numbers:
        numbers["flops"] = FLOPS_PER_ND * numbers["params"] * numbers["tokens"]
    elif "params" not in numbers:
        numbers["params"] = numbers["flops"] / (FLOPS_PER_ND * numbers["tokens"])
    elif "tokens" not in numbers:
        numbers["tokens"] = numbers["flops"] / (FLOPS_PER_ND * numbers["params"])
    return numbers, ""


def _repeats(rows: Array, names: Sequence[str]) -> dict[int, str]:
    """Return index -> reason of the rows that are exactly equal to an earlier one."""
    _, first, of = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    first = first[np.ravel(of)]
    return {i: f"is equal to {names[j]}" for i, j in enumerate(first.tolist()) if i != j}


def _diverged(points: Points) -> dict[int, str]:
    """Return index -> reason of the runs with a far higher loss than a smaller, shorter run."""
    unique = points.known_unique
    reasons = {}
    for i, loss in enumerate(points.loss):
        below = (points.params <= points.params[i]) & (points.tokens <= points.tokens[i])
        below &= unique <= unique[i]
        best = np.flatnonzero(below)[np.argmin(points.loss[below])]
        if loss > 2 * points.loss[best]:
            reasons[i] = (
                f"diverged: loss {loss:g}, but {points.names[best]} with no more parameters or "
                f"tokens has {points.loss[best]:g}"
            )
    return reasons


@dataclass(frozen=True)
class Fit:
    """The fitted parameters of a law, draws of them, and diagnostics.

    - `objective`: its minimum.
    - `optimal`: exponents with which the best N and D grow with FLOPs.
    - `samples`, `optimal_samples`: parameters and exponents of each draw, as arrays [draws].
    - `scatter`: log(loss) - log(law) of the points.
    - `path`: the file that the fit was read from.
    """

    law: str
    estimator: str
    parameters: Mapping[str, float]
    objective: float
    points: Points
    optimal: Mapping[str, float]
    samples: Mapping[str, Array] = field(default_factory=dict)
    optimal_samples: Mapping[str, Array] = field(default_factory=dict)
    scatter: Array = field(default_factory=lambda: np.zeros(0))
    diagnostics: Mapping[str, Any] = field(default_factory=dict)
    path: Path = Path("fit.json")

    @property
    def standard_errors(self) -> dict[str, float | None]:
        """Standard error of each parameter: the standard deviation of its draws."""
        drawn = {name: self.samples.get(name, ()) for name in self.parameters}
        return {
            name: float(np.std(draws, ddof=1)) if len(draws) > 1 else None
            for name, draws in drawn.items()
        }

    @property
    def intervals(self) -> dict[str, Interval]:
        """Interval of each parameter: the middle 95 % of its draws."""
        return {name: interval(self.samples.get(name)) for name in self.parameters}

    def to_json(self) -> JsonObject:
        """Return the object that `--json` prints; its keys are published and do not change."""
        exponents = {name: interval(draws) for name, draws in self.optimal_samples.items()}
        return {
            "law": self.law,
            "estimator": self.estimator,
            "parameters": dict(self.parameters),
            "standard_errors": self.standard_errors,
            "intervals": self.intervals,
            "objective": self.objective,
            "points": len(self.points),
            "dropped": [gone._asdict() for gone in self.points.dropped],
            "diagnostics": dict(self.diagnostics) | {"optimal_exponents_intervals": exponents},
            "optimal_exponents": dict(self.optimal),
        }

    def document(self) -> JsonObject:
        """Return the contents of fit.json: `to_json` with the data that forecasts need."""
        points = self.points
        return self.to_json() | {
            "data": {
                "sha256": points.digest,
                "names": list(points.names),
                **{name: getattr(points, name).tolist() for name in _COLUMNS},
            },
            "scatter": self.scatter.tolist(),
            "samples": {name: draws.tolist() for name, draws in self.samples.items()},
        }

    @classmethod
    def read(cls, path: Path) -> "Fit":
        """Read a fit.json; raise ConfigError for a file that `scale fit` did not write."""
        text = reader.text_of(path)
        try:
            raw = json.loads(text)
            data = raw["data"]
            columns: dict[str, Any] = {name: np.array(data[name], dtype=float) for name in _COLUMNS}
            return cls(
                law=str(raw["law"]),
                estimator=str(raw["estimator"]),
                parameters={str(k): float(v) for k, v in raw["parameters"].items()},
                objective=raw["objective"],
                optimal=dict(raw["optimal_exponents"]),
                points=Points(**columns, names=tuple(data["names"]), columns={}),
                samples={str(k): np.array(v, dtype=float) for k, v in raw["samples"].items()},
                scatter=np.array(raw["scatter"], dtype=float),
                diagnostics=dict(raw["diagnostics"]),
                path=path,
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(
                f"--fit {path}: is not a fit; name a fit.json of `scale fit`"
            ) from None


def errors_of(predicted: Array, losses: Array) -> dict[str, float]:
    """Return the mean, the bias and the worst of the relative errors of predicted losses."""
    errors = predicted / losses - 1
    return {
        "mean_error": float(np.mean(np.abs(errors))),
        "bias": float(np.mean(errors)),
        "worst_error": float(np.max(np.abs(errors))),
    }


def interval(draws: Array | None) -> Interval:
    """Return the percentiles 2.5 and 97.5 of the draws; None if there are no draws."""
    if draws is None or not len(draws):
        return None
    low, high = np.percentile(draws, [2.5, 97.5])
    return [float(low), float(high)]
