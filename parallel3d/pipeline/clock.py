"""Measure when the actions of a pipeline program ran, on the device's clock (floor 4)."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from parallel3d.schedule.schedule import Action, Span

_TRIES = 5  # attempts to read two clocks at the same moment
_CLOSE = 2e-5  # seconds that one such reading may take


class Timed(Protocol):
    """An object that waits for the device to measure times if `timed` is set."""

    timed: bool


@contextmanager
def timing(*parts: Timed) -> Iterator[None]:
    """Set `timed` on all parts inside the context."""
    before = [part.timed for part in parts]
    for part in parts:
        part.timed = True
    try:
        yield
    finally:
        for part, was in zip(parts, before, strict=True):
            part.timed = was


class DeviceClock:
    """A clock whose marks are queued in the order of the device's work.

    Marks are events of the device. On a CPU, whose work is done when a call returns, they are
    seconds of `time.perf_counter`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first_seen: float | None = None  # unix time of an accelerator's first mark

    def mark(self) -> Any:
        """Mark the moment when all work that is queued so far will be done."""
        if self._device.type == "cpu":
            return time.perf_counter()
        if self._first_seen is None:
            self._first_seen = time.time()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def spans(self, marks: list[tuple[Action, Any, Any]]) -> tuple[float, float, list[Span]]:
        """Return the Unix times of the first mark and of now, and each action's span.

        `marks` has each action with the marks before and after it. Spans are in seconds since the
        first mark. Wait until the device is done.
        """
        end = self.mark()
        first = marks[0][1] if marks else end
        if self._device.type == "cpu":
            started = first + _unix_minus_process_time()
            seconds = [(action, a - first, b - first) for action, a, b in marks]
            return started, started + end - first, [Span(*s) for s in seconds]
        end.synchronize()
        assert self._first_seen is not None
        spans = [
            Span(action, first.elapsed_time(a) / 1e3, first.elapsed_time(b) / 1e3)
            for action, a, b in marks
        ]
        return self._first_seen, self._first_seen + first.elapsed_time(end) / 1e3, spans


def _unix_minus_process_time() -> float:
    """Return Unix time minus `time.perf_counter`.

    Several attempts, because the process may be suspended between reading the two clocks.
    """
    best, offset = float("inf"), 0.0
    for _ in range(_TRIES):
        before, unix, after = time.perf_counter(), time.time(), time.perf_counter()
        if after - before < best:
            best, offset = after - before, unix - (before + after) / 2
        if best < _CLOSE:
            break
    return offset
