"""Progress of a preparation on standard error: bars on a terminal, otherwise plain lines."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

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
    last: dict[str, float] = {}

    def show(phase: str, done: int, total: int) -> None:
        now = time.monotonic()
        due = phase not in last or (total > 1 and now - last[phase] >= SECONDS_BETWEEN_LINES)
        if due or done == total > 1:
            last[phase] = now
            print(f"{phase}: {done:,} of {total:,}" if total > 1 else phase, file=sys.stderr)

    return show
