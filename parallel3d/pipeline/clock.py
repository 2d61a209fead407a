"""Measure when the actions of a pipeline program ran, on the device's clock (floor 4)."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import record_function

from parallel3d.schedule.schedule import Action, Span


@contextmanager
def timing(*parts: object) -> Iterator[None]:
    """Set `timed` on all parts inside the context, which then wait for the device."""
    with ExitStack() as stack:
        for part in parts:
            stack.enter_context(patch.object(part, "timed", True))
        yield


class DeviceClock:
    """A clock whose marks are queued in the order of the device's work.

    Marks are events of the device. On a CPU, whose work is done when a call returns, they are
    seconds of `time.perf_counter`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first_seen: float | None = None  # unix time of an accelerator's first mark
        self._marks: list[tuple[Action, Any, Any]] = []

    @contextmanager
    def measuring(self, action: Action) -> Iterator[None]:
        """Mark when the work that is queued inside begins and ends, and name it in traces."""
        start = self.mark()
        with record_function(str(action)):
            yield
        self._marks.append((action, start, self.mark()))

    def mark(self) -> Any:
        """Mark the moment when all work that is queued so far will be done."""
        if self._device.type == "cpu":
            return time.perf_counter()
        if self._first_seen is None:
            self._first_seen = time.time()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def spans(self) -> tuple[float, float, list[Span]]:
        """Return the Unix times of the first mark and of now, and the span of each action measured.

        Spans are in seconds since the first mark. Wait until the device is done.
        """
        end = self.mark()
        first = self._marks[0][1] if self._marks else end
        if self._device.type == "cpu":
            started = first + time.time() - time.perf_counter()
        else:
            end.synchronize()
            assert self._first_seen is not None
            started = self._first_seen

        def since(mark: Any) -> float:
            """Return the seconds from the first mark to another."""
            if self._device.type == "cpu":
                return float(mark - first)
            return float(first.elapsed_time(mark) / 1e3)

        spans = [Span(action, since(a), since(b)) for action, a, b in self._marks]
        return started, started + since(end), spans
