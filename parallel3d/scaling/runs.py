"""Folders of runs of launch/train.py (config.json, metrics.jsonl), read as a table.

A run's loss is the held-out loss of its last line, if that is of its last step.
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
from parallel3d.scaling.run_table import Table, number

CONFIG, METRICS = "config.json", "metrics.jsonl"
CORPUS = "corpus.json"  # of a run, or of a ladder's directory, counted as its corpus was prepared
COUNTS = ("with_head", "transformer", "total")
"""How a run's parameters are counted, each a column; N is the first unless a flag names another."""
ERROR = "held_out_standard_error"
UNIQUE = "corpus_unique_tokens"
ALL = 10**12
"""Held-out samples of an evaluation: more than there are, so all."""
_TAIL = 2**20  # bytes of metrics.jsonl, far more than its last line
_MOST_POINTS = 300  # of a curve that is drawn


class NoEnd(Exception):
    """The reason why a run's folder gives no point."""


@dataclass(frozen=True)
class Curve:
    """A run's losses over time: tokens seen and training loss, [steps]; held out, where known."""

    name: str
    tokens: list[float]
    loss: list[float]
    held_out: list[tuple[float, float]]


@dataclass(frozen=True)
class PartCounts:
    """Parameters of a model by part; `total` counts a tied copy once.

    The head's projection counts with the head even where it is the embedding's.
    """

    embedding: int
    head: int
    transformer: int
    total: int

    @property
    def with_head(self) -> int:
        """N of scaling laws: parameters of blocks and head."""
        return self.transformer + self.head


def count(model: Any) -> PartCounts:
    """Return the parameters of a model of any family; its vocabulary must be known."""
    embedding, *blocks, head = models.layers(model)
    return PartCounts(
        embedding.num_params, sum(param.numel for param in head.params),
        sum(layer.num_params for layer in blocks), models.num_params(model),
    )  # fmt: skip


def read_runs(folder: Path) -> Table:
    """Return a row for each finished run in a folder; the others are left out by name.

    Unique tokens are those of a run, else of its ladder. Raises ConfigError where no run did.
    """
    rows: dict[str, dict[str, Any]] = {}
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
            f"{folder}: holds no finished run{why_not}; give a table, or the folder in which "
            "launch/train.py wrote its runs"
        )
    # A column that some runs lack would drop them.
    columns = [c for c in next(iter(rows.values())) if all(c in row for row in rows.values())]
    return Table(folder, tuple(columns), tuple(rows.values()), tuple(rows), tuple(left_out))


def unique_tokens(directory: Path) -> int | None:
    """Return training tokens of the corpus of a run or a ladder; None where not recorded."""
    try:
        return int(json.loads((directory / CORPUS).read_text())["training_tokens"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def curves(folder: Path) -> list[Curve]:
    """Return the loss curves of every run in a folder, thinned for drawing."""
    found = []
    for path in _folders(folder):
        try:
            text = (path / METRICS).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        lines = [line for line in map(_parsed, text.split("\n")) if line]
        tokens, loss = _series(lines[:: max(1, len(lines) // _MOST_POINTS)], "loss")
        held_out = list(zip(*_series(lines, "held_out_loss"), strict=True))
        found.append(Curve(path.name, tokens, loss, held_out))
    return found


def _series(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Return tokens and values of a metric where it is a number."""
    kept = [line for line in lines if _is_number(line.get(name))]
    return [float(line["tokens"]) for line in kept], [float(line[name]) for line in kept]


def settings(folder: Path) -> dict[str, str]:
    """Return settings of the runs that matter for training, each with all of its values."""
    found: dict[str, set[str]] = {}
    for path in _folders(folder):
        try:
            config = config_of(path)
        except NoEnd:
            continue
        train, schedule, data = config.train, config.train.lr_schedule, config.data
        adam, samples, ends = config.optimizer.params, train.evaluate_samples, ""
        if schedule.type != "constant":
            ends = f" to {schedule.min_ratio:g} at each end"
        for name, value in {
            "architecture": config.model.family, "vocabulary": config.model.vocab_size,
            "sequence length": data.sequence_length, "training data": data.source,
            "tokenizer": data.tokenizer, "steps": train.steps,
            "batch, tokens": config.tokens_per_step, "learning rate": adam.lr,
            "learning-rate schedule": f"{schedule.type}{ends}",
            "warm-up, steps": schedule.warmup_steps,
            "betas, weight decay": f"{list(adam.betas)}, {adam.weight_decay}",
            "precision": config.precision, "seeds": train.seed,
            "held-out samples": "all" if samples >= ALL else samples,
        }.items():  # fmt: skip
            found.setdefault(name, set()).add(str(value))
    return {name: _few(values) for name, values in found.items()}


def _few(values: set[str]) -> str:
    """Return some of the values in order, numbers first."""
    order = sorted(values, key=lambda text: (number(text) is None, number(text) or 0, text))
    more = f" and {len(order) - 8} more" if len(order) > 8 else ""
    return f"{', '.join(order[:8])}{more}"


def config_of(path: Path) -> RunConfig:
    """Return the resolved config in a run's folder; raises NoEnd if none can be used."""
    try:
        raw = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        config = RunConfig.from_dict(raw, source=str(path / CONFIG))
        config.tokens_per_step, models.num_params(config.model)  # what is resolved has them
        return config
    except (OSError, ValueError, TypeError, AssertionError) as problem:
        said = str(problem).splitlines() or [type(problem).__name__]
        raise NoEnd(f"its {CONFIG} cannot be used ({said[0]})") from None


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
    except OSError as problem:
        raise ConfigError(f"{folder}: cannot be read ({problem.strerror}); check it") from None


def _row(path: Path) -> dict[str, Any]:
    config = config_of(path)
    steps, counted = config.train.steps, count(config.model)
    per_token = models.train_flops_per_token(config.model, config.data.sequence_length)
    last = last_line(path / METRICS)
    if steps is None or last["step"] < steps:
        raise NoEnd(f"it has no end: step {last['step']} of {steps or 'no known number'}")
    if "held_out_loss" not in last:
        raise NoEnd("its last step has no held_out_loss; hold out more of its data")
    unique, lr = unique_tokens(path), config.optimizer.params.lr
    error = ((last.get("validation") or {}).get("held_out") or {}).get("standard_error")
    maybe = {"lr": lr, UNIQUE: unique, ERROR: error}
    return {
        **{name: getattr(counted, name) for name in COUNTS},
        "tokens": last["tokens"],
        # JSON has no NaN: what is not finite is null there.
        "held_out_loss": "nan" if last["held_out_loss"] is None else last["held_out_loss"],
        "exact_flops": per_token * last["tokens"],
        "batch_tokens": config.tokens_per_step,
        **{name: value for name, value in maybe.items() if _is_number(value)},
    }


def last_line(path: Path) -> dict[str, Any]:
    """Return the last whole line of metrics.jsonl, whose end may be cut off; raises NoEnd."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        raise NoEnd(f"it has no {METRICS}") from None
    for line in reversed(text.split("\n")):
        if found := _parsed(line):
            return found
    raise NoEnd(f"its {METRICS} has no line")


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
        int(found["step"]), float(found["tokens"])
        return dict(found)
    except (ValueError, KeyError, TypeError):
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
