"""What a run reports of its steps: one JSON line each, and progress on the terminal.

Nothing here knows ranks: the process that constructs a writer or a progress display is the one
that reports.
"""

import json
import logging
import math
import os
import resource
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich import progress
from rich.console import Console

from parallel3d.atomic import replace_text
from parallel3d.errors import ConfigError

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
    held_out_loss: float | None = None
    """Only on lines of steps after which the model was evaluated."""
    loss_scale: float | None = None
    """Only in fp16; a step whose gradients overflowed under it was skipped: grad_norm is null."""
    checkpoint_stall_seconds: float | None = None
    """Only on the line after a save: the seconds for which it held training up."""

    def to_json(self) -> str:
        """One line without its end; JSON has no NaN, so what is not finite is null."""
        values = asdict(self)
        for name in ("held_out_loss", "loss_scale", "checkpoint_stall_seconds"):
            if values[name] is None:
                del values[name]
        return json.dumps({k: finite(v) for k, v in values.items()}, allow_nan=False)


class MetricsWriter:
    """Appends to <directory>/metrics.jsonl, and writes TensorBoard's files if asked to."""

    def __init__(self, directory: Path, tensorboard: bool = False) -> None:
        self.path = directory / METRICS
        self._tracker = _tensorboard_tracker(directory) if tensorboard else None
        directory.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, metrics: StepMetrics) -> None:
        """Add one step; it is on disk when this returns."""
        self._file.write(metrics.to_json() + "\n")
        self._file.flush()
        if self._tracker:
            values = {k: v for k, v in asdict(metrics).items() if k != "step" and v is not None}
            self._tracker.log(values, step=metrics.step)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._tracker:
            self._tracker.finish()


def step_reached(folder: Path) -> int:
    """The last step in the folder's metrics.jsonl, whose last line may be torn; 0 without any."""
    try:
        with open(folder / METRICS, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            ended, _, _ = file.read().decode(errors="replace").rpartition("\n")
    except OSError:
        return 0
    return next((step for step, _ in reversed(_lines(ended))), 0)


def forget_after(metrics: Path, step: int) -> None:
    """Drop the lines of steps that will be done again, so that each step has one line."""
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


def require_tensorboard() -> None:
    """Raise ConfigError with the remedy if TensorBoard is not installed."""
    if find_spec("tensorboard") is None:
        raise ConfigError(
            "parallel3d.run.tensorboard = true: the package tensorboard is not installed; "
            "pip install tensorboard, or set it to false"
        )


def _tensorboard_tracker(directory: Path) -> Any:
    require_tensorboard()
    from accelerate import tracking

    # The tracker and its logger ask accelerate's PartialState which rank this is, and setting that
    # up would choose a device and a backend a second time; the caller has decided already.
    tracking.logger = logging.getLogger("accelerate.tracking")
    tracker = tracking.TensorBoardTracker(run_name="tensorboard", logging_dir=str(directory))
    tracker.main_process_only = False
    tracker.start()
    return tracker


class Progress:
    """Shows steps as they end: a bar on a terminal, aligned lines every `every` steps in a log."""

    def __init__(self, num_steps: int, every: int = 10, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._num_steps, self._every = num_steps, every
        self._bar: progress.Progress | None = None
        if self.console.is_terminal:
            self._bar = progress.Progress(
                progress.TextColumn("step"),
                progress.MofNCompleteColumn(),
                progress.BarColumn(bar_width=24),
                progress.TextColumn("{task.fields[numbers]}"),
                progress.TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._bar.add_task("", total=num_steps, numbers="")
            self._bar.start()

    def show(self, metrics: StepMetrics) -> None:
        """Show a step that has ended."""
        step, last = metrics.step, self._num_steps
        if self._bar:
            self._bar.update(self._task, completed=step, numbers=_numbers(metrics, brief=True))
        evaluated = metrics.held_out_loss is not None
        if evaluated or (not self._bar and (step % self._every == 0 or step in (1, last))):
            self.say(f"step {step:>{len(str(last))}}/{last}  {_numbers(metrics)}")

    def say(self, text: str) -> None:
        """Show a line of text."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar:
            self._bar.stop()


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this process has held on `device`.

    An accelerator's is what torch allocated; a CPU's is the peak resident set of the process, which
    counts the interpreter and its libraries too.
    """
    if device.type != "cpu":
        peak: int = torch.get_device_module(device).max_memory_allocated(device)
        return peak
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024  # Linux counts KiB


def measure_peak_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.2) -> float:
    """FLOP/s of the fastest square matmul found in about `seconds`.

    A stand-in for a published peak, where there is none: what the threads of this process reach
    now, while other ranks may be using the same cores.
    """
    best, size, start = 0.0, 128, time.perf_counter()
    while size <= 8192:
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        left @ right  # the first call of a size also picks the kernel
        elapsed = min(_timed_matmul(left, right) for _ in range(3))
        best = max(best, 2 * size**3 / elapsed)
        size *= 2
        # Doubling the size makes each of the four calls eight times as long.
        if time.perf_counter() - start + 4 * 8 * elapsed > seconds:
            break
    return best


def _timed_matmul(left: torch.Tensor, right: torch.Tensor) -> float:
    backend = torch.get_device_module(left.device)
    backend.synchronize()
    start = time.perf_counter()
    left @ right
    backend.synchronize()
    return time.perf_counter() - start


def _numbers(metrics: StepMetrics, brief: bool = False) -> str:
    """What a line says of a step; `brief` leaves room for a bar on a terminal of 80 columns."""
    parts = [f"loss {metrics.loss:.4f}"]
    if not brief:
        parts += [f"norm {metrics.grad_norm:.3f}", f"lr {metrics.lr:.1e}"]
    parts += [f"{metrics.tokens_per_second:,.0f} tokens/s", f"MFU {percent(metrics.mfu)}"]
    if metrics.held_out_loss is not None and not brief:
        parts.insert(1, f"held-out {metrics.held_out_loss:.4f}")
    return "  ".join(parts)


def finite(number: float | None) -> float | None:
    """The number; None, as JSON has no NaN, where there is none."""
    return number if number is not None and math.isfinite(number) else None


def percent(share: float | None) -> str:
    """A share of 1 as people read it; "-" where it is not known."""
    return "-" if share is None else f"{100 * share:.1f} %"
