"""Metrics of a run: one line of JSON per step.

This module does not know ranks: the process that constructs a writer is the one that reports.
"""

import json
import math
import os
import resource
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch

from parallel3d.base.atomic import replace_text
from parallel3d.base.journal import record
from parallel3d.base.reader import JsonObject, flat
from parallel3d.base.say import Say
from parallel3d.base.step_lines import METRICS, finite, newest, parsed
from parallel3d.train.digests import DIGESTS
from parallel3d.train.evaluation import HELD_OUT, OF_EMA, Losses
from parallel3d.train.trackers import Trackers


def mfu_of(flops: float, peak_flops: float | None) -> float | None:
    """Return the share of a device's peak that a run's FLOP/s reach; None if it is not known.

    A run that is faster than its peak shows that the peak is wrong: that of a CPU is measured at
    the start of the run, when other programs may have the cores.
    """
    mfu = flops / peak_flops if peak_flops else None
    return None if mfu is None or mfu > 1 else mfu


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl. Its keys are published and must not change."""

    step: int
    """Steps done, counted from 1."""
    loss: float
    """Mean training loss of the step, nats per token."""
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    """Learning rate of the step."""
    tokens: int
    """Tokens trained on since the start of the run."""
    tokens_per_second: float
    """Tokens per second of the whole mesh."""
    tflops_per_device: float
    """Model FLOPs (no recomputation, attention in full) per device and second, in 1e12."""
    mfu: float | None
    """tflops_per_device divided by the device's peak, from 0 to 1; null if no peak is known, or
    the step is faster than it."""
    peak_memory_bytes: int
    """Largest peak memory of all ranks."""
    step_seconds: float
    """Wall-clock time of the step."""
    validation: Losses = field(default_factory=dict)
    """Only after steps with an evaluation: for each set its loss and standard error in nats,
    tokens, documents and bits_per_byte. The loss of "held_out" is also written as held_out_loss.
    With train.ema the average of the weights is evaluated too: "held_out_ema" and held_out_loss_ema
    belong to it."""
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Only after steps of train.evaluate_tasks: for each task its metrics, and their standard
    errors as METRIC_stderr."""
    loss_scale: float | None = None
    """Only in fp16. If the gradients of a step overflow, it is skipped and grad_norm is null."""
    role_lr: dict[str, float] = field(default_factory=dict)
    """Learning rate of each role; only if the model's parametrization scales rates by role."""
    side_losses: dict[str, float] = field(default_factory=dict)
    """Mean of each side loss over the layers that have it and the batch, without its coefficient;
    only if the model has any. `loss` is without them."""
    experts: dict[str, list[float]] = field(default_factory=dict)
    """For each layer with experts: loads, each expert's share of the batch's tokens relative to the
    mean; max_load and min_load; entropy of the shares, 1 at balance; dropped, the share of tokens
    beyond an expert's capacity. As one list here: the loads, and dropped."""
    part_epochs: dict[str, float] = field(default_factory=dict)
    """How often each part of a mixture has been read; "mixture.0" is the first part."""
    gradient_noise: dict[str, float] = field(default_factory=dict)
    """Only after steps of train.noise_scale_every: estimates of the `trace` of the covariance of a
    sample's gradient and of the `square` of the true gradient's norm, and their ratio `scale`, the
    gradient noise scale in samples. Single steps are noisy: divide means of the first two."""
    checkpoint_stall_seconds: float | None = None
    """Seconds for which a save held up training; only on the line after the save."""

    def to_json(self) -> str:
        """Return one line of JSON without a newline; numbers that are not finite are null."""
        values = {name: getattr(self, name) for name in _ALWAYS} | _in_json(self.validation)
        if self.experts:
            experts = {}
            for layer, row in self.experts.items():
                loads = [round(load, 4) for load in row[:-1]]
                experts[layer] = {"loads": loads} | _balance(row)
            values["experts"] = experts
        for name in _SOMETIMES:
            value = getattr(self, name)
            if value not in (None, {}):
                values[name] = value
        return json.dumps(finite(values), allow_nan=False)


def numbers_of(line: Mapping[str, object]) -> dict[str, float]:
    """Return the numbers of a line by the names that trackers get: validation/<set>/loss."""
    values = flat(line, separator="/").items()
    return {name: x for name, x in values if isinstance(x, int | float) and name != "step"}


def _in_json(validation: Losses) -> JsonObject:
    """Return the keys that an evaluation adds to a line."""
    sets = {name: loss.to_json() for name, loss in validation.items()}
    values: JsonObject = {}
    for end in ("", OF_EMA):
        if HELD_OUT + end in sets:
            values[f"held_out_loss{end}"] = sets[HELD_OUT + end]["loss"]
    if sets:
        values["validation"] = sets
    return values


def _balance(row: list[float]) -> dict[str, float]:
    """Return how even the loads of a layer's experts are, and the share of dropped tokens."""
    *loads, dropped = row
    shares = [load / len(loads) for load in loads if load > 0]
    entropy = -sum(share * math.log(share) for share in shares)
    return {
        "max_load": max(loads),
        "min_load": min(loads),
        "entropy": entropy / math.log(len(loads)) if len(loads) > 1 else 1.0,
        "dropped": dropped,
    }


_SOMETIMES = (
    "role_lr",
    "side_losses",
    "part_epochs",
    "gradient_noise",
    "scores",
    "loss_scale",
    "checkpoint_stall_seconds",
)
_ALWAYS = tuple(
    f.name for f in fields(StepMetrics) if f.name not in ("validation", "experts", *_SOMETIMES)
)


class MetricsWriter:
    """Appends metrics to <directory>/metrics.jsonl and passes them to `trackers`.

    While the disk is full or unreachable, lines are kept in memory, which is reported once by
    `say`. Raises OSError if the file cannot be created.
    """

    def __init__(self, directory: Path, trackers: Trackers | None = None, say: Say = print) -> None:
        self.path = directory / METRICS
        self._trackers = trackers
        self._say = say
        directory.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        self._unwritten = b""  # starts where the last write was cut off
        self._full = False

    def write(self, metrics: StepMetrics) -> None:
        """Append one step; on return it was passed to the system, unless the disk is full."""
        line = metrics.to_json()
        self._unwritten += f"{line}\n".encode()
        self._flush()
        if self._trackers is not None:
            self._trackers.log(numbers_of(json.loads(line)), metrics.step)

    def complete(self, validation: Losses) -> None:
        """Add an evaluation to the last line, if a request to stop had cut it off there."""
        values = newest(self.path)
        if not validation or not values or "validation" in values:
            return
        with suppress(OSError):  # the run is done; only its last line lacks the evaluation
            *before, _ = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            added = json.dumps(finite(values | _in_json(validation)), allow_nan=False)
            replace_text(self.path, f"{''.join(before)}{added}\n", shared=True)
        if self._trackers is not None:
            self._trackers.log(numbers_of(_in_json(validation)), values["step"])

    def rewind(self, step: int) -> None:
        """Remove the lines and digests of steps after `step`, which will be repeated."""
        self._flush()
        try:
            forget_after(self.path, step)
            forget_after(self.path.with_name(DIGESTS), step)
        except OSError as error:
            self._say(f"METRICS NOT WRITTEN: {self.path} has lines of repeated steps ({error})")

    def close(self) -> None:
        """Close the trackers; report lost metrics if the disk is still full."""
        self._flush()
        if self._unwritten:
            lines = self._unwritten.count(b"\n")
            self._say(f"METRICS LOST: the last {lines} lines of {self.path} could not be written")
        if self._trackers is not None:
            self._trackers.finish()

    def _flush(self) -> None:
        try:
            while self._unwritten:
                # Opened each time, because `complete` and `rewind` replace the file.
                with self.path.open("ab", buffering=0) as file:
                    # A disk that fills up takes a part of a line; the rest follows later.
                    self._unwritten = self._unwritten[os.write(file.fileno(), self._unwritten) :]
        except OSError as error:
            if not self._full:
                record("metrics_not_written", reason=f"{error.strerror} ({self.path})")
                self._say(
                    f"METRICS NOT WRITTEN: {self.path} ({error.strerror}). Training continues; the "
                    "lines stay in memory and are written as soon as there is room"
                )
            self._full = True
            return
        if self._full:
            self._full = False
            self._say(f"the delayed metrics are now in {self.path}")


def peak_memory_bytes(device: torch.device) -> int:
    """Return this process's peak memory on `device` in bytes.

    On an accelerator it is torch's allocated memory, on a CPU the process's resident set.
    """
    if device.type != "cpu":
        return int(torch.get_device_module(device).max_memory_allocated(device))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024  # Linux counts KiB


def step_reached(folder: Path) -> int:
    """Return the last complete step in a folder's metrics.jsonl; 0 if there is none."""
    return int(newest(folder / METRICS).get("step", 0))


def forget_after(file: Path, step: int) -> None:
    """Remove the lines of steps after `step`, which will be repeated, from a file of a run."""
    if file.exists():
        lines = parsed(file.read_text(errors="replace").split("\n"))
        replace_text(file, "".join(f"{x}\n" for row, x in lines if int(row["step"]) <= step))


@dataclass
class Result:
    """The result of a launch: its steps, losses, speed and last evaluation."""

    steps: int = 0
    trained: int = 0
    """Steps of this launch."""
    loss: float = math.nan
    """Loss of the last step's batch."""
    mean_loss: float = math.nan
    """Mean loss of the last `mean_loss_of` steps of this launch."""
    loss_deviation: float = math.nan
    """Standard deviation of the loss of a single one of these steps."""
    mean_loss_of: int = 0
    validation: Losses = field(default_factory=dict)
    """Losses of the last evaluation: the held-out text, a mixture's parts, validation sets."""
    tokens_per_second: float = 0.0
    tflops_per_device: float = 0.0
    mfu: float | None = None
    peak_memory_bytes: list[int] = field(default_factory=list)
    stopped: bool = False

    @property
    def held_out_loss(self) -> float | None:
        """Held-out loss in nats per token; None if nothing was evaluated."""
        return self.validation[HELD_OUT].loss if HELD_OUT in self.validation else None
