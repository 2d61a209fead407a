"""Tables of runs: from CSV, JSON or JSON Lines, or a folder of runs of launch/train.py.

The loss of a run in a folder (config.json, metrics.jsonl) is the held-out loss at its last step.
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parallel3d import models
from parallel3d.base import reader
from parallel3d.base.counts import read_number
from parallel3d.base.errors import ConfigError
from parallel3d.base.reader import JsonObject
from parallel3d.base.section import nearest
from parallel3d.base.step_lines import METRICS, newest
from parallel3d.config import CompleteConfig, RunConfig
from parallel3d.model.config import ModelConfig
from parallel3d.model.parametrization import parametrization_of

CONFIG = "config.json"
CORPUS = "corpus.json"  # token counts, in a run's folder or in a ladder's directory
COUNTS = ("with_head", "transformer", "total")
"""Columns with different counts of a run's parameters; N is the first unless a flag names another.
"""
ERROR = "held_out_standard_error"
UNIQUE = "corpus_unique_tokens"
ALL = 10**12
"""Value of train.evaluate_samples for all held-out samples: more than there are."""


@dataclass(frozen=True)
class Table:
    """A table of runs.

    - `rows`: column -> cell, a text or a JSON value.
    - `names`: "line 7" for a row of a file, otherwise the name of the run.
    """

    path: Path
    columns: tuple[str, ...]
    rows: tuple[Mapping[str, object], ...]
    names: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...] = ()
    """(name, reason) of runs without a row."""

    def column(self, name: str, flag: str) -> str:
        """Return `name` if the table has this column; otherwise raise ConfigError for the flag."""
        if name not in self.columns:
            raise ConfigError(
                f'{flag} = "{name}": is not a column of {self.path}; {nearest(name, self.columns)}'
            )
        return name

    def take(self, rows: Sequence[int]) -> "Table":
        """Return the table with only the rows at these indices."""
        selected = tuple(self.rows[i] for i in rows)
        names = tuple(self.names[i] for i in rows)
        return replace(self, rows=selected, names=names)

    def where(self, conditions: Sequence[str]) -> "Table":
        """Return the table with only the rows that meet all conditions, each COLUMN=VALUE."""
        table = self
        for condition in conditions:
            name, equals, value = condition.partition("=")
            if not equals:
                raise ConfigError(f'--where = "{condition}": has no value; write COLUMN=VALUE')
            cells = [row.get(self.column(name, "--where")) for row in table.rows]
            rows = [i for i, cell in enumerate(cells) if _same(cell, value)]
            if not rows:
                some = ", ".join(sorted({str(cell) for cell in cells})[:12])
                raise ConfigError(
                    f'--where = "{condition}": matches no row; use a value of {name}: {some}'
                )
            table = table.take(rows)
        return table


def read(path: Path) -> Table:
    """Read a table from a file: CSV, a JSON list of objects, or one JSON object per line.

    The first character tells which. Raises ConfigError if it cannot be read or has no row.
    """
    text = reader.text_of(path)
    rows_of = _json if text.lstrip()[:1] in ("[", "{") else _csv
    named = list(rows_of(path, text))
    if not named:
        raise ConfigError(
            f"{path}: has no rows; write a line of column names, then one row per run"
        )
    for name, row in named:
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, {name}: is not an object; write one JSON object per run")
    columns = dict.fromkeys(column for _, row in named for column in row)
    names, rows = zip(*named, strict=True)
    return Table(path, tuple(columns), rows, names)


def _json(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each row of a list, or of each line."""
    try:
        if text.lstrip().startswith("["):
            yield from ((f"row {i}", row) for i, row in enumerate(json.loads(text), 1))
        else:
            lines = enumerate(text.split("\n"), 1)
            yield from ((f"line {i}", json.loads(line)) for i, line in lines if line.strip())
    except json.JSONDecodeError as problem:
        raise ConfigError(
            f"{path}: is not valid JSON ({problem}); write a list of objects, or one per line"
        ) from None


def _csv(path: Path, text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the place and the cells of each row; missing cells are empty."""
    delimiter = max(",;\t", key=text.partition("\n")[0].count)
    rows = csv.DictReader(
        io.StringIO(text, newline=""), restval="", delimiter=delimiter, skipinitialspace=True
    )
    columns = list(rows.fieldnames or ())
    if len(set(columns)) < len(columns):
        raise ConfigError(f"{path}: has two columns of one name: {', '.join(columns)}; rename one")
    for row in rows:
        if None in row:
            raise ConfigError(
                f"{path}, line {rows.line_num}: has more cells than the {len(columns)} of the "
                "first line; name every column there"
            )
        yield f"line {rows.line_num}", row


def number(cell: Any) -> float | None:
    """Return the number in a cell, which may be nan, inf or "1.5B"; None if it holds none."""
    try:
        return float(cell)
    except (TypeError, ValueError):
        pass
    with suppress(ValueError):
        return float(read_number(cell)) if isinstance(cell, str) else None
    return None


def _same(cell: object, value: str) -> bool:
    as_number = number(cell)
    return str(cell) == value or (as_number is not None and as_number == number(value))


class NoEnd(ConfigError):
    """The reason why a run's folder is not a point of a fit."""


@dataclass(frozen=True)
class PartCounts:
    """The number of parameters in each part of a model.

    A tied output projection counts in both `embedding` and `head`, but once in `total`.
    """

    embedding: int
    head: int
    transformer: int
    total: int
    inactive: int = 0
    """Parameters of the blocks that a token does not use."""

    @property
    def active(self) -> int:
        """Parameters of the blocks that each token uses."""
        return self.transformer - self.inactive

    @property
    def with_head(self) -> int:
        """The N of scaling laws: active parameters of the blocks and the head."""
        return self.active + self.head


def count(model: ModelConfig) -> PartCounts:
    """Count the parameters of a model of any family; its vocabulary size must be known."""
    embedding, *blocks, head = models.layers(model)
    return PartCounts(
        embedding.num_params,
        sum(param.numel for param in head.params),
        sum(layer.num_params for layer in blocks),
        models.num_params(model),
        sum(layer.num_params - layer.num_active_params for layer in blocks),
    )


def read_runs(folder: Path) -> Table:
    """Return a table with a row for each finished run in a folder; it lists the others by name.

    Unique tokens are those of the run if recorded, else those of its ladder. Raises ConfigError if
    no run has finished.
    """
    rows: dict[str, JsonObject] = {}
    left_out = []
    unique = unique_tokens(folder)
    for path in _folders(folder):
        try:
            rows[path.name] = ({} if unique is None else {UNIQUE: unique}) | _row(path)
        except NoEnd as why:
            left_out.append((path.name, str(why)))
    if not rows:
        why_not = f"; {left_out[0][0]}: {left_out[0][1]}" if left_out else ""
        raise ConfigError(
            f"{folder}: has no finished runs{why_not}; name a table, or a folder with the runs of "
            "launch/train.py"
        )
    # Runs without a cell would be dropped, so keep only the columns that all of them have.
    columns = [c for c in next(iter(rows.values())) if all(c in row for row in rows.values())]
    return Table(folder, tuple(columns), tuple(rows.values()), tuple(rows), tuple(left_out))


def unique_tokens(directory: Path) -> int | None:
    """Return the training tokens of the corpus of a run or a ladder; None if not recorded."""
    try:
        return int(json.loads((directory / CORPUS).read_text())["training_tokens"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def settings(folder: Path) -> dict[str, str]:
    """Return the settings that affect training: name -> the values of all runs, as text."""
    values_by_name: dict[str, set[str]] = {}
    for path in _folders(folder):
        try:
            config = config_of(path)
        except NoEnd:
            continue
        train = config.train
        schedule = config.train.lr_schedule
        data = config.data
        adam = config.optimizer.params
        samples = train.evaluate_samples
        shape: str = schedule.type
        if shape != "constant":
            shape += f" to {schedule.min_ratio:g} of the peak at the end"
        betas = list(getattr(adam, "betas", ()))
        for name, value in {
            "architecture": config.model.family,
            "vocabulary": config.model.vocab_size,
            "sequence length": data.sequence_length,
            "training data": data.source,
            "tokenizer": data.tokenizer,
            "steps": train.steps,
            "batch, tokens": config.tokens_per_step,
            "learning rate": adam.lr,
            "learning-rate schedule": shape,
            "warm-up, steps": schedule.warmup_steps,
            "betas, weight decay": f"{betas}, {getattr(adam, 'weight_decay', 0.0)}",
            "precision": config.precision,
            "seeds": train.seed,
            "held-out samples": "all" if samples >= ALL else samples,
        }.items():
            values_by_name.setdefault(name, set()).add(str(value))
    return {name: _few(values) for name, values in values_by_name.items()}


def _few(values: set[str]) -> str:
    """Join at most eight of the values in order, numbers first."""
    order = sorted(values, key=lambda text: (number(text) is None, number(text) or 0, text))
    if len(order) > 8:
        order[8:] = ["..."]
    return ", ".join(order)


def config_of(path: Path) -> CompleteConfig:
    """Return the complete config in a run's folder; raise NoEnd if it cannot be used."""
    try:
        raw = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        return RunConfig.from_dict(raw, source=str(path / CONFIG)).completed()
    except (OSError, ValueError, TypeError, AssertionError) as problem:
        lines = str(problem).splitlines() or [type(problem).__name__]
        raise NoEnd(
            f"{path / CONFIG}: cannot be used ({lines[0]}); remove it, or name the folder of a run"
        ) from None


def _folders(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))


def _row(path: Path) -> JsonObject:
    config = config_of(path)
    steps = config.num_steps
    counted = count(config.model)
    per_token = models.train_flops_per_token(config.model, config.data.sequence_length)
    last = newest(path / METRICS)
    if last.get("step", 0) < steps:
        raise NoEnd(f"not finished: step {last.get('step', 0)} of {steps}")
    if "held_out_loss" not in last:
        raise NoEnd("its last step has no held_out_loss; hold out more of its data")
    error = ((last.get("validation") or {}).get("held_out") or {}).get("standard_error")
    maybe = {"lr": config.optimizer.params.lr, UNIQUE: unique_tokens(path), ERROR: error}
    return {
        **{name: getattr(counted, name) for name in COUNTS},
        "tokens": last["tokens"],
        # metrics.jsonl has null for a loss that is not finite.
        "held_out_loss": "nan" if last["held_out_loss"] is None else last["held_out_loss"],
        "exact_flops": per_token * last["tokens"],
        "batch_tokens": config.tokens_per_step,
        "parametrization": parametrization_of(config.model).type,
        **{name: value for name, value in maybe.items() if number(value) is not None},
    }
