"""Progress of a ladder's runs: bars on a terminal, else a line as each begins or ends."""

import time
from collections.abc import Iterable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from parallel3d.base import terminal
from parallel3d.scaling.ladder.expand import LadderRun
from parallel3d.scaling.ladder.process import Process
from parallel3d.scaling.runs import METRICS, NoEnd, last_line


class Display:
    """A display of the runs in progress, and of how many are finished."""

    def __init__(self, out: Console, total: int, finished: int) -> None:
        self._out, self._started = out, time.monotonic()
        columns = (
            TextColumn("{task.description}"), BarColumn(),
            TextColumn("{task.completed}/{task.total}"), TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
        )  # fmt: skip
        self._bars = Progress(*columns, console=out, disable=not out.is_terminal)
        self._tasks: dict[str, TaskID] = {}
        self._all = self._bars.add_task("all runs", total=total, completed=finished, loss="")

    def __enter__(self) -> "Display":
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._bars.stop()

    def say(self, text: str) -> None:
        """Print a line with the time since the start."""
        seconds = int(time.monotonic() - self._started)
        terminal.say(self._out, f"{seconds // 60:3}:{seconds % 60:02}  {text}", " " * 8)

    def began(self, run: LadderRun) -> None:
        """Note that a run has started."""
        self._tasks[run.name] = self._bars.add_task(run.name, total=run.steps, loss="")

    def ended(self, run: LadderRun, is_finished: bool) -> None:
        """Note that a run has ended."""
        if task := self._tasks.pop(run.name, None):
            self._bars.remove_task(task)
        if is_finished:
            self._bars.advance(self._all)

    def look(self, processes: Iterable[Process]) -> None:
        """Read how far the runs are, for their bars."""
        if self._bars.disable:
            return
        for process in processes:
            try:
                last = last_line(process.run.folder / METRICS)
            except NoEnd:
                continue
            loss = last.get("loss")
            shown = f"loss {loss:.3f}" if isinstance(loss, float) else ""
            self._bars.update(
                self._tasks[process.run.name], completed=int(last["step"]), loss=shown
            )
