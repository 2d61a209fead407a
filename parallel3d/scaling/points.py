"""Points of a fit: each run's size, tokens, FLOPs and loss, and the runs that were dropped."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from parallel3d.base.errors import ConfigError
from parallel3d.scaling.run_table import Table, number

Array = npt.NDArray[np.float64]
FLOPS_PER_PARAM_AND_TOKEN = 6
"""Of forward and backward: C = 6ND (arXiv:2001.08361, section 2.1)."""
DIVERGED = 2.0
"""A loss so many times that of a smaller model on fewer tokens is of a run that diverged."""
NAMES = {
    "params": ("params", "n", "N", "n_params", "num_params", "parameters", "with_head"),
    "tokens": ("tokens", "d", "D", "n_tokens", "num_tokens", "training_tokens"),
    "flops": ("flops", "c", "C", "compute", "training_flops"),
    "loss": ("loss", "held_out_loss", "val_loss", "validation_loss", "final_loss"),
    "standard_error": ("held_out_standard_error",),
    "unique": ("corpus_unique_tokens",),
}
"""What a column is called where no flag names it; the first that a table has."""
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
    """Sizes, tokens, FLOPs and losses of runs: arrays [points].

    `flops` of training; `loss` in nats per token.
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
        """The points in `rows`, which are indices or a mask."""
        index = np.arange(len(self))[rows]
        some = None if self.standard_error is None else self.standard_error[index]
        unique = None if self.unique is None else self.unique[index]
        others = {name: values[index] for name, values in self.others.items()}
        return replace(
            self, params=self.params[index], tokens=self.tokens[index], flops=self.flops[index],
            loss=self.loss[index], names=tuple(self.names[i] for i in index),
            standard_error=some, unique=unique, others=others,
        )  # fmt: skip

    @property
    def digest(self) -> str:
        """SHA-256 of size, tokens, FLOPs and loss of all points, whatever their order."""
        columns = (self.params, self.tokens, self.flops, self.loss)
        lines = sorted(" ".join(map(repr, row)) for row in zip(*(c.tolist() for c in columns)))  # noqa: B905
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def points_of(
    table: Table,
    named: Mapping[str, str | None],
    *,
    others: Sequence[tuple[str, str]] = (),
    drop_largest: int = 0,
) -> Points:
    """The points of a table without unusable rows, which are listed.

    `named`: column of params, tokens, flops, loss, standard_error and unique, where a flag names
    it. `others`: flags and names of further columns of numbers above 0. `drop_largest`: so many
    points of the largest losses are left out, too. Of params, tokens and flops any two are enough
    (C = 6ND). Raises ConfigError for a column that is missing, or where no row can be used.
    """
    columns = _columns(table, named)
    dropped = [Dropped(*gone) for gone in table.left_out]
    rows: list[dict[str, float]] = []
    names: list[str] = []
    read = columns | {f"other {name}": table.column(flag, name) for flag, name in others}
    for name, cells in zip(table.names, table.rows, strict=True):
        values = {what: number(cells.get(column)) for what, column in read.items()}
        if reason := _unusable(values, read, cells):
            dropped.append(Dropped(name, reason))
            continue
        found = {what: float(value) for what, value in values.items() if value is not None}
        missing = [what for what in ("params", "tokens", "flops") if what not in found]
        if missing:
            found[missing[0]] = _third(found, missing[0])
        rows.append(found)
        names.append(name)
    keep = _fresh(rows, names, dropped)
    keep = _converged(rows, keep, names, dropped)
    keep = _smaller(rows, keep, names, dropped, drop_largest)
    if not keep:
        why = f"; {dropped[0].row}: {dropped[0].reason}" if dropped else ""
        raise ConfigError(f"{table.path}: no row can be used{why}; give each run's size and loss")
    part = [rows[i] for i in keep]

    def array(what: str) -> Array:
        return np.array([row[what] for row in part])

    return Points(
        params=array("params"), tokens=array("tokens"), flops=array("flops"), loss=array("loss"),
        names=tuple(names[i] for i in keep), columns=columns, dropped=tuple(dropped),
        standard_error=array("standard_error") if "standard_error" in columns else None,
        unique=array("unique") if "unique" in columns else None,
        others={name: array(f"other {name}") for _, name in others},
    )  # fmt: skip


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
    if len(found.keys() & {"params", "tokens", "flops"}) < 2:
        has = ", ".join(sorted(found.keys() & {"params", "tokens", "flops"})) or "none"
        raise ConfigError(
            f"{table.path}: two of parameters, tokens and FLOPs are needed, and {has} is known; "
            "name columns with --n-column, --d-column, --flops-column; the table has: "
            f"{', '.join(table.columns)}"
        )
    return found


def _third(found: Mapping[str, float], what: str) -> float:
    """The one of N, D and C = 6ND that a row lacks."""
    if what == "flops":
        return FLOPS_PER_PARAM_AND_TOKEN * found["params"] * found["tokens"]
    other = "tokens" if what == "params" else "params"
    return found["flops"] / (FLOPS_PER_PARAM_AND_TOKEN * found[other])


def _unusable(
    values: Mapping[str, float | None], columns: Mapping[str, str], cells: Mapping[str, object]
) -> str:
    for what, value in values.items():
        column = columns[what]
        if value is None:
            return f"{column} = {cells.get(column)!r} is no number"
        if not math.isfinite(value):
            return f"{column} = {value}: the run diverged, or was not measured"
        if value <= 0:
            return f"{column} = {value:g} is not above 0"
    return ""


def _fresh(rows: Sequence[dict[str, float]], names: list[str], dropped: list[Dropped]) -> list[int]:
    """The rows that no earlier row repeats to the last digit; another seed has another loss."""
    seen: dict[tuple[tuple[str, float], ...], int] = {}
    for i, row in enumerate(rows):
        first = seen.setdefault(tuple(sorted(row.items())), i)
        if first != i:
            dropped.append(Dropped(names[i], f"repeats {names[first]}"))
    return sorted(seen.values())


def _converged(
    rows: Sequence[dict[str, float]], keep: list[int], names: list[str], dropped: list[Dropped]
) -> list[int]:
    """Without runs whose loss is far above that of a smaller model on fewer tokens."""
    array: Callable[[str], Array] = lambda what: np.array([rows[i][what] for i in keep])  # noqa: E731
    params, tokens, loss = array("params"), array("tokens"), array("loss")
    unique = array("unique") if keep and "unique" in rows[keep[0]] else tokens
    kept = []
    for place, i in enumerate(keep):
        below = (params <= params[place]) & (tokens <= tokens[place]) & (unique <= unique[place])
        best = np.flatnonzero(below)[np.argmin(loss[below])]
        if loss[place] > DIVERGED * loss[best]:
            least = names[keep[best]]
            reason = f"diverged: loss {loss[place]:g}, and {loss[best]:g} at {least} with no more "
            dropped.append(Dropped(names[i], f"{reason}parameters or tokens"))
        else:
            kept.append(i)
    return kept


def _smaller(
    rows: Sequence[dict[str, float]], keep: list[int], names: list[str], dropped: list[Dropped],
    count: int,
) -> list[int]:  # fmt: skip
    """Without the `count` largest losses."""
    largest = sorted(keep, key=lambda i: -rows[i]["loss"])[:count]
    rule = f"one of the {count} largest losses (--drop-largest-losses)"
    dropped += [Dropped(names[i], f"loss {rows[i]['loss']:g}: {rule}") for i in sorted(largest)]
    return [i for i in keep if i not in largest]
