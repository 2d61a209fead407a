"""Progress of a preparation on standard error: bars on a terminal, otherwise plain lines."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from math import inf

from parallel3d.data.sources import Progress

SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """Yield a `Progress` that is displayed during the block."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    with Bars(console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=total)
            bars.update(tasks[phase], completed=done, total=total)

        yield show


def _lines() -> Progress:
    last: dict[str, tuple[float, int]] = {}  # when a phase was printed, and how much was done
    first: dict[str, tuple[float, int]] = {}  # the same of its first line

    def show(phase: str, done: int, total: int) -> None:
        now = time.monotonic()
        (then, before) = last.get(phase, (-inf, -1))
        due = now - then >= SECONDS_BETWEEN_LINES or done == total
        if before < 0 or (total > 1 and done != before and due):
            last[phase] = now, done
            began, at_first = first.setdefault(phase, (now, done))
            left = ""
            if at_first < done < total:
                seconds = (now - began) * (total - done) / (done - at_first)
                left = f", {timedelta(seconds=round(seconds))} left"
            line = f"{phase}: {done:,} of {total:,}{left}" if total > 1 else phase
            print(line, file=sys.stderr)

    return show
