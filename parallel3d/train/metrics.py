"""Metrics of a run: one JSON line for each step.

Nothing here knows ranks: the process that constructs a writer is the one that reports.
"""

import json
import math
import os
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from parallel3d.base.atomic import replace_text
from parallel3d.train.evaluation import HELD_OUT, Losses
from parallel3d.train.trackers import Trackers

METRICS = "metrics.jsonl"
_TAIL = 2**20  # bytes of it, far more than its last line


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl; its keys are published and do not change."""

    step: int
    """Steps done, from 1."""
    loss: float
    """Mean training loss of the step, nats per token."""
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    """Learning rate of the step."""
    tokens: int
    """Tokens trained on since the start of the run."""
    tokens_per_second: float
    """Over the whole mesh."""
    tflops_per_device: float
    """Model FLOPs (no recomputation, attention in full) per device and second, in 1e12."""
    mfu: float | None
    """tflops_per_device over the device's peak, from 0 to 1; null where no peak is known."""
    peak_memory_bytes: int
    """Largest of the ranks."""
    step_seconds: float
    """Wall-clock time of the step."""
    validation: Losses = field(default_factory=dict)
    """Only on lines of steps after which the model was evaluated: of each set its loss and standard
    error in nats, tokens, documents and bits_per_byte. That of "held_out" is held_out_loss, too."""
    loss_scale: float | None = None
    """Only in fp16; a step whose gradients overflowed under it was skipped: grad_norm is null."""
    role_lr: dict[str, float] = field(default_factory=dict)
    """Only where the model's parametrization gives roles rates of their own: the rate of each."""
    checkpoint_stall_seconds: float | None = None
    """Only on the line after a save: the seconds for which it held training up."""

    def to_json(self) -> str:
        """One line of JSON without its newline; a number that is not finite is null."""
        values: dict[str, Any] = {name: finite(getattr(self, name)) for name in _ALWAYS}
        values |= _in_json(self.validation)
        if self.role_lr:
            values["role_lr"] = self.role_lr
        for name in _SOMETIMES:
            if (value := getattr(self, name)) is not None:
                values[name] = finite(value)
        return json.dumps(values, allow_nan=False)

    def flat(self) -> dict[str, float]:
        """The numbers of a step under trackers' names: validation/<set>/loss."""
        values = {name: getattr(self, name) for name in (*_ALWAYS[1:], *_SOMETIMES)}
        found = {name: value for name, value in values.items() if value is not None}
        found |= {f"lr/{role}": lr for role, lr in self.role_lr.items()}
        return found | _flat(self.validation)


def _in_json(validation: Losses) -> dict[str, Any]:
    """The keys that an evaluation adds to a line."""
    values: dict[str, Any] = {}
    if HELD_OUT in validation:
        values[_HELD_OUT_LOSS] = finite(validation[HELD_OUT].loss)
    if validation:
        values["validation"] = {name: found.to_json() for name, found in validation.items()}
    return values


def _flat(validation: Losses) -> dict[str, float]:
    """The numbers of an evaluation under trackers' names."""
    values = {_HELD_OUT_LOSS: validation[HELD_OUT].loss} if HELD_OUT in validation else {}
    for name, found in validation.items():
        numbers = vars(found).items()
        values |= {f"validation/{name}/{key}": x for key, x in numbers if x is not None}
    return values


_HELD_OUT_LOSS = "held_out_loss"
_SOMETIMES = ("loss_scale", "checkpoint_stall_seconds")
_BLOCKS = ("validation", "role_lr")
_ALWAYS = tuple(f.name for f in fields(StepMetrics) if f.name not in (*_BLOCKS, *_SOMETIMES))


class MetricsWriter:
    """A writer that appends to <directory>/metrics.jsonl and calls `trackers`.

    If the disk is full or away, lines are kept until there is room, and `say` hears of it once.
    OSError if the file cannot be created.
    """

    def __init__(
        self, directory: Path, trackers: Trackers | None = None, say: Callable[[str], None] = print
    ) -> None:
        self.path, self._trackers, self._say = directory / METRICS, trackers, say
        directory.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._kept = b""  # what is not written yet, from where the last write was cut off
        self._full = False

    def write(self, metrics: StepMetrics) -> None:
        """Add one step; the system has it on return, if the disk has room."""
        self._kept += f"{metrics.to_json()}\n".encode()
        self._flush()
        if self._trackers is not None:
            self._trackers.log(metrics.flat(), metrics.step)

    def complete(self, validation: Losses) -> None:
        """Add to the last line the evaluation that a request to stop had cut off.

        The line of a step that was evaluated stays as it is.
        """
        try:
            text = self.path.read_text(encoding="utf-8")
            *before, last = text.splitlines(keepends=True) or [""]
            values = json.loads(last or "{}")
            if not validation or "validation" in values or not values:
                return
            added = json.dumps(values | _in_json(validation), allow_nan=False)
            replace_text(self.path, "".join(before) + added + "\n", shared=True)
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        except (OSError, ValueError) as error:
            self._say(f"METRICS: {self.path} lacks the last evaluation ({error})")
            return
        os.close(self._file)
        self._file = file
        if self._trackers is not None:
            self._trackers.log(_flat(validation), values["step"])

    def close(self) -> None:
        """Close the files; say which metrics are lost if the disk is still full."""
        self._flush()
        if self._kept:
            lines = self._kept.count(b"\n")
            self._say(f"METRICS LOST: the last {lines} lines of {self.path} could not be written")
        with suppress(OSError):
            os.close(self._file)
        if self._trackers is not None:
            self._trackers.finish()

    def _flush(self) -> None:
        try:
            while self._kept:
                # A disk that fills takes a part of a line; the rest follows when it has room.
                self._kept = self._kept[os.write(self._file, self._kept) :]
        except OSError as error:
            if not self._full:
                self._say(
                    f"METRICS NOT WRITTEN: {self.path} ({error.strerror}). Training goes on; the "
                    "lines are kept in memory and written as soon as there is room"
                )
            self._full = True
            return
        if self._full:
            self._full = False
            self._say(f"the metrics that were kept are in {self.path} now")


def peak_memory_bytes(device: torch.device) -> int:
    """The most bytes of memory that this process has held on `device`.

    On an accelerator what torch allocated; on a CPU the process's peak resident set.
    """
    if device.type != "cpu":
        peak: int = torch.get_device_module(device).max_memory_allocated(device)
        return peak
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024  # Linux counts KiB


def finite(number: float | None) -> float | None:
    """The number if it is finite, else None, as JSON has no NaN."""
    return number if number is not None and math.isfinite(number) else None


def step_reached(folder: Path) -> int:
    """The last step in a folder's metrics.jsonl, whose last line may be torn; 0 without one."""
    try:
        with open(folder / METRICS, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            ended, _, _ = file.read().decode(errors="replace").rpartition("\n")
    except OSError:
        return 0
    return next((step for step, _ in reversed(_lines(ended))), 0)


def forget_after(metrics: Path, step: int) -> None:
    """Drop the lines of steps after `step`, which will be done again, from metrics.jsonl."""
    if metrics.exists():
        lines = _lines(metrics.read_text(errors="replace"))
        replace_text(metrics, "".join(line for number, line in lines if number <= step))


def _lines(text: str) -> list[tuple[int, str]]:
    """Each line that is whole, and its step; a kill may have cut off only the end of the last."""
    result = []
    for line in text.split("\n"):
        with suppress(ValueError, KeyError, TypeError):
            result.append((int(json.loads(line)["step"]), f"{line}\n"))
    return result
