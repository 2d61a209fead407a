"""Read a folder of training runs (config.json, metrics.jsonl) as a table.

The loss of a run is the held-out loss at its last step.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel3d import models
from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from parallel3d.model.config import ModelConfig
from parallel3d.model.parametrization import parametrization_of
from parallel3d.scaling.run_table import Table, number

CONFIG, METRICS = "config.json", "metrics.jsonl"
CORPUS = "corpus.json"  # token counts, in a run's folder or in a ladder's directory
COUNTS = ("with_head", "transformer", "total")
"""Columns with different counts of a run's parameters; N is the first unless a flag names another.
"""
ERROR = "held_out_standard_error"
UNIQUE = "corpus_unique_tokens"
ALL = 10**12
"""Value of train.evaluate_samples for all held-out samples: more than there are."""
_TAIL = 2**20  # bytes read from the end of metrics.jsonl, far more than a line
_MOST_POINTS = 300  # points of a loss curve in a plot


class NoEnd(Exception):
    """The reason why a run's folder is not a point of a fit."""


@dataclass(frozen=True)
class Curve:
    """The losses of a run over its training tokens."""

    name: str
    tokens: list[float]  # [steps]
    loss: list[float]  # [steps], training loss
    held_out: list[tuple[float, float]]  # (tokens, held-out loss) of each evaluation


@dataclass(frozen=True)
class PartCounts:
    """The number of parameters in each part of a model.

    A tied output projection counts in both `embedding` and `head`, but once in `total`.
    """

    embedding: int
    head: int
    transformer: int
    total: int
    inactive: int = 0  # of the blocks: those that a token does not use

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
        embedding.num_params, sum(param.numel for param in head.params),
        sum(layer.num_params for layer in blocks), models.num_params(model),
        sum(layer.num_params - layer.num_active_params for layer in blocks),
    )  # fmt: skip


def read_runs(folder: Path) -> Table:
    """Return a table with a row for each finished run in a folder; it lists the others by name.

    Unique tokens are those of the run if recorded, else those of its ladder. Raises ConfigError if
    no run has finished.
    """
    rows: dict[str, dict[str, object]] = {}
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


def curves(folder: Path) -> list[Curve]:
    """Return the loss curve of every run in a folder, with fewer points for plotting."""
    loss_curves = []
    for path in _folders(folder):
        try:
            text = (path / METRICS).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        lines = [line for line in map(_parsed, text.split("\n")) if line]
        tokens, loss = _series(lines[:: max(1, len(lines) // _MOST_POINTS)], "loss")
        held_out = list(zip(*_series(lines, "held_out_loss"), strict=True))
        loss_curves.append(Curve(path.name, tokens, loss, held_out))
    return loss_curves


def _series(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Return the tokens and the values of a metric, from the lines in which it is a number."""
    measured = [line for line in lines if _is_number(line.get(name))]
    return [float(line["tokens"]) for line in measured], [float(line[name]) for line in measured]


def settings(folder: Path) -> dict[str, str]:
    """Return the settings that affect training: name -> the values of all runs, as text."""
    values_by_name: dict[str, set[str]] = {}
    for path in _folders(folder):
        try:
            config = config_of(path)
        except NoEnd:
            continue
        train, schedule, data = config.train, config.train.lr_schedule, config.data
        adam, samples = config.optimizer.params, train.evaluate_samples
        final = f" to {schedule.min_ratio:g} of the peak at the end"
        for name, value in {
            "architecture": config.model.family, "vocabulary": config.model.vocab_size,
            "sequence length": data.sequence_length, "training data": data.source,
            "tokenizer": data.tokenizer, "steps": train.steps,
            "batch, tokens": config.tokens_per_step, "learning rate": adam.lr,
            "learning-rate schedule":
                f"{schedule.type}{final if schedule.type != 'constant' else ''}",
            "warm-up, steps": schedule.warmup_steps,
            "betas, weight decay":
                f"{list(getattr(adam, 'betas', ()))}, {getattr(adam, 'weight_decay', 0.0)}",
            "precision": config.precision, "seeds": train.seed,
            "held-out samples": "all" if samples >= ALL else samples,
        }.items():  # fmt: skip
            values_by_name.setdefault(name, set()).add(str(value))
    return {name: _few(values) for name, values in values_by_name.items()}


def _few(values: set[str]) -> str:
    """Join at most eight of the values in order, numbers first."""
    order = sorted(values, key=lambda text: (number(text) is None, number(text) or 0, text))
    more = f" and {len(order) - 8} more" if len(order) > 8 else ""
    return f"{', '.join(order[:8])}{more}"


def config_of(path: Path) -> RunConfig:
    """Return the resolved config in a run's folder; raise NoEnd if it cannot be used."""
    try:
        raw = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        config = RunConfig.from_dict(raw, source=str(path / CONFIG))
        config.tokens_per_step, models.num_params(config.model)  # fails unless it is resolved
        return config
    except (OSError, ValueError, TypeError, AssertionError) as problem:
        lines = str(problem).splitlines() or [type(problem).__name__]
        raise NoEnd(f"its {CONFIG} cannot be used ({lines[0]})") from None


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
    except OSError as problem:
        raise ConfigError(
            f"{folder}: cannot be read ({problem.strerror}); check its permissions"
        ) from None


def _row(path: Path) -> dict[str, object]:
    config = config_of(path)
    steps, counted = config.train.steps, count(config.model)
    per_token = models.train_flops_per_token(config.model, config.data.sequence_length)
    last = last_line(path / METRICS)
    if steps is None or last["step"] < steps:
        raise NoEnd(f"not finished: step {last['step']} of {steps or 'an unknown number'}")
    if "held_out_loss" not in last:
        raise NoEnd("its last step has no held_out_loss; hold out more of its data")
    unique, lr = unique_tokens(path), config.optimizer.params.lr
    error = ((last.get("validation") or {}).get("held_out") or {}).get("standard_error")
    maybe = {"lr": lr, UNIQUE: unique, ERROR: error}
    return {
        **{name: getattr(counted, name) for name in COUNTS},
        "tokens": last["tokens"],
        # metrics.jsonl has null for a loss that is not finite.
        "held_out_loss": "nan" if last["held_out_loss"] is None else last["held_out_loss"],
        "exact_flops": per_token * last["tokens"],
        "batch_tokens": config.tokens_per_step,
        "parametrization": parametrization_of(config.model).type,
        **{name: value for name, value in maybe.items() if _is_number(value)},
    }


def last_line(path: Path) -> dict[str, Any]:
    """Return the last complete line of metrics.jsonl; raise NoEnd if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        raise NoEnd(f"it has no {METRICS}") from None
    for line in reversed(text.split("\n")):
        if parsed := _parsed(line):
            return parsed
    raise NoEnd(f"its {METRICS} has no complete line")


def _parsed(line: str) -> dict[str, object] | None:
    try:
        parsed = json.loads(line)
        int(parsed["step"]), float(parsed["tokens"])
        return dict(parsed)
    except (ValueError, KeyError, TypeError):
        return None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
