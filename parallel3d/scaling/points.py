"""Points of a fit: each run's size, tokens, FLOPs and loss, and the runs that were dropped."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallel3d.base.errors import ConfigError
from parallel3d.scaling.run_table import Table, number

Array = npt.NDArray[np.float64]
FLOPS_PER_PARAM_AND_TOKEN = 6
"""C = 6ND, forward and backward (arXiv:2001.08361, section 2.1)."""
DIVERGED = 2.0
"""A loss so many times that of a smaller model on fewer tokens is of a run that diverged."""
SAME = 1e-3  # sizes and tokens that differ by less, relative, are one
SAME_BUDGET = 0.05  # the same of budgets: runs end with a whole step
NAMES = {
    "params": ("params", "n", "N", "n_params", "num_params", "parameters", "with_head"),
    "tokens": ("tokens", "d", "D", "n_tokens", "num_tokens", "training_tokens"),
    "flops": ("flops", "c", "C", "compute", "training_flops"),
    "loss": ("loss", "held_out_loss", "val_loss", "validation_loss", "final_loss"),
    "standard_error": ("held_out_standard_error",),
    "unique": ("corpus_unique_tokens",),
}
"""Names of a column where no flag names it; the first that a table has is taken."""
FLAGS = {
    "params": "--n-column", "tokens": "--d-column", "flops": "--flops-column",
    "loss": "--loss-column", "standard_error": "--error-column", "unique": "--unique-column",
}  # fmt: skip


class Dropped(NamedTuple):
    """A row that is left out of every fit, and why."""

    row: str
    reason: str


@dataclass(frozen=True)
class Points:
    """Sizes, tokens, FLOPs and losses (nats per token) of runs: arrays [points]."""

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
        """Return the points in `rows`, which are indices or a mask."""
        index = np.arange(len(self))[rows]
        arrays: dict[str, Any] = {
            k: v[index] for k, v in vars(self).items() if isinstance(v, np.ndarray)
        }
        others = {name: values[index] for name, values in self.others.items()}
        names = tuple(self.names[i] for i in index)
        return replace(self, names=names, others=others, **arrays)

    def without(self, reasons: Mapping[int, str]) -> "Points":
        """Return the points but those in `reasons`, which are listed with these as dropped."""
        gone = [Dropped(self.names[i], reason) for i, reason in reasons.items()]
        rest = self.take(np.array([i not in reasons for i in range(len(self))], dtype=bool))
        return replace(rest, dropped=(*self.dropped, *gone))

    @property
    def digest(self) -> str:
        """SHA-256 of size, tokens, FLOPs and loss of all points, whatever their order."""
        columns = (self.params, self.tokens, self.flops, self.loss)
        lines = sorted(" ".join(map(repr, row)) for row in np.column_stack(columns).tolist())
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def groups(values: Array, same: float = SAME) -> list[np.ndarray]:
    """Return indices of values that are equal to within `same` (relative), in ascending groups."""
    order = np.argsort(values, kind="stable")
    cuts = np.flatnonzero(np.diff(np.log(values[order])) > same) + 1
    return np.split(order, cuts)


def points_of(
    table: Table, named: Mapping[str, str | None], *, others: Sequence[tuple[str, str]] = (),
    drop_largest: int = 0,
) -> Points:  # fmt: skip
    """Return the points of a table without unusable rows, which are listed.

    `named`: columns by their use. `others`: flags and names of further columns of numbers above 0.
    Any two of params, tokens and flops are enough. Raises ConfigError for a column that is missing,
    or where no row can be used.
    """
    columns = _columns(table, named)
    dropped = [Dropped(*gone) for gone in table.left_out]
    rows: list[dict[str, float]] = []
    names: list[str] = []
    read = columns | {f"other {name}": table.column(flag, name) for flag, name in others}
    for name, cells in zip(table.names, table.rows, strict=True):
        row, reason = _numbers(read, cells)
        if reason:
            dropped.append(Dropped(name, reason))
        else:
            rows.append(row)
            names.append(name)
    arrays = {what: np.array([row[what] for row in rows]) for what in (rows[0] if rows else ())}
    if rows:
        found = Points(
            **{what: arrays[what] for what in ("params", "tokens", "flops", "loss")},
            names=tuple(names), columns=columns, dropped=tuple(dropped),
            standard_error=arrays.get("standard_error"), unique=arrays.get("unique"),
            others={name: arrays[f"other {name}"] for _, name in others},
        )  # fmt: skip
        found = found.without(_repeats(np.column_stack(list(arrays.values())), names))
        found = found.without(_diverged(found))
        largest = sorted(np.argsort(-found.loss, kind="stable")[:drop_largest].tolist())
        rule = f"one of the {drop_largest} largest losses (--drop-largest-losses)"
        found = found.without({i: f"loss {found.loss[i]:g}: {rule}" for i in largest})
        if len(found):
            return found
        dropped = list(found.dropped)
    why = f"; {dropped[0].row}: {dropped[0].reason}" if dropped else ""
    raise ConfigError(f"{table.path}: no row can be used{why}; give each run's size and loss")


def _columns(table: Table, named: Mapping[str, str | None]) -> dict[str, str]:
    found = {}
    for what, flag in FLAGS.items():
        if name := named.get(what):
            found[what] = table.column(flag, name)
        elif usual := [n for n in NAMES.get(what, ()) if n in table.columns]:
            found[what] = usual[0]
    if "loss" not in found:
        raise ConfigError(
            f"--loss-column: is missing, and {table.path} has no column {NAMES['loss'][0]}; name "
            f"one of its columns: {', '.join(table.columns)}"
        )
    known = sorted(found.keys() & {"params", "tokens", "flops"})
    if len(known) < 2:
        raise ConfigError(
            f"{table.path}: two of parameters, tokens and FLOPs are needed, and "
            f"{', '.join(known) or 'none'} is known; "
            "name columns with --n-column, --d-column, --flops-column; the table has: "
            f"{', '.join(table.columns)}"
        )
    return found


def _numbers(
    columns: Mapping[str, str], cells: Mapping[str, object]
) -> tuple[dict[str, float], str]:
    """Return the numbers of a row, the one of N, D and C = 6ND that it lacks, and what is wrong."""
    found: dict[str, float] = {}
    for what, column in columns.items():
        value = number(cells.get(column))
        if value is None:
            return {}, f"{column} = {cells.get(column)!r} is no number"
        if not math.isfinite(value):
            return {}, f"{column} = {value}: the run diverged, or was not measured"
        if value <= 0:
            return {}, f"{column} = {value:g} is not above 0"
        found[what] = value
    six = FLOPS_PER_PARAM_AND_TOKEN
    if "flops" not in found:
        found["flops"] = six * found["params"] * found["tokens"]
    elif "params" not in found:
        found["params"] = found["flops"] / (six * found["tokens"])
    elif "tokens" not in found:
        found["tokens"] = found["flops"] / (six * found["params"])
    return found, ""


def _repeats(rows: Array, names: Sequence[str]) -> dict[int, str]:
    """Return the rows that repeat an earlier one to the last digit, and which."""
    _, first, of = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    first = first[np.ravel(of)]
    return {i: f"repeats {names[j]}" for i, j in enumerate(first.tolist()) if i != j}


def _diverged(points: Points) -> dict[int, str]:
    """Return the runs whose loss is far above that of a smaller model on fewer tokens."""
    unique = points.tokens if points.unique is None else points.unique
    found = {}
    for i, loss in enumerate(points.loss):
        below = (points.params <= points.params[i]) & (points.tokens <= points.tokens[i])
        below &= unique <= unique[i]
        best = np.flatnonzero(below)[np.argmin(points.loss[below])]
        if loss > DIVERGED * points.loss[best]:
            found[i] = (
                f"diverged: loss {loss:g}, and {points.loss[best]:g} at {points.names[best]} with "
                "no more parameters or tokens"
            )
    return found
