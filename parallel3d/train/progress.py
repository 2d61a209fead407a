"""Progress of a run: a curve and a bar on a terminal, lines in a log.

This module does not know ranks.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from math import isfinite
from statistics import fmean

from rich import progress
from rich.console import Console, ConsoleOptions, RenderableType

from parallel3d.train.metrics import StepMetrics

_ROWS = 6
_COLUMNS = 64
_LABEL = 8
# The dots of a braille character's two columns, from top to bottom.
_DOTS = ((0x1, 0x2, 0x4, 0x40), (0x8, 0x10, 0x20, 0x80))


class LossCurve:
    """Draws the losses of a launch as a curve in braille, for a display of rich.

    It keeps at most 2 x `_COLUMNS` points; each is the mean of equally many steps.
    """

    def __init__(self) -> None:
        self._points: list[float] = []
        self._newest: list[float] = []
        self._steps_per_point = 1

    def add(self, loss: float) -> None:
        """Add the loss of a step, if it is finite."""
        if isfinite(loss):
            self._newest.append(loss)
        if len(self._newest) == self._steps_per_point:
            self._points.append(fmean(self._newest))
            self._newest.clear()
        if len(self._points) == 2 * _COLUMNS:
            self._points = [fmean(self._points[i : i + 2]) for i in range(0, 2 * _COLUMNS, 2)]
            self._steps_per_point *= 2

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[str]:
        """Yield the lines of the curve; none before its third point, or without Unicode."""
        width = min(_COLUMNS, options.max_width - _LABEL - 2)
        if len(self._points) > 2 and width > 8 and not options.ascii_only:
            yield "\n".join(draw(self._points[-2 * width :]))


def draw(values: Sequence[float]) -> list[str]:
    """Return `_ROWS` lines with a curve, 2 values per character; its extremes stand on the left."""
    low = min(values)
    high = max(values)
    cells = [[0] * -(-len(values) // 2) for _ in range(_ROWS)]
    last = 4 * _ROWS - 1
    for column, value in enumerate(values):
        place = round((high - value) / ((high - low) or 1.0) * last)  # from the top
        cells[place // 4][column // 2] |= _DOTS[column % 2][place % 4]
    labels = {0: f"{high:.3f}", _ROWS - 1: f"{low:.3f}"}
    lines = []
    for number, row in enumerate(cells):
        label = labels.get(number, "")
        curve = "".join(chr(0x2800 + dots) for dots in row)
        lines.append(f"{label:>{_LABEL}} ┤{curve}")
    return lines


class _Bar(progress.Progress):
    """A progress bar below the curve of the losses."""

    curve = LossCurve()  # `Progress` sets its own

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield what rich displays, from top to bottom."""
        yield self.curve
        yield from super().get_renderables()


class Progress:
    """Displays finished steps: a curve and a bar on a terminal, a line per `every` steps in a log.

    Evaluations have a line in both.
    """

    def __init__(
        self, num_steps: int, every: int = 10, console: Console | None = None, first: int = 0
    ) -> None:
        self.console = console or Console(stderr=True)
        self._num_steps = num_steps
        self._every = every
        self._bar = _Bar(
            progress.TextColumn("step"),
            progress.MofNCompleteColumn(),
            progress.BarColumn(bar_width=16),
            progress.TextColumn("{task.fields[numbers]}"),
            console=self.console,
            disable=not self.console.is_terminal,
            get_time=lambda: time.monotonic(),
            speed_estimate_period=3600.0,  # seconds of steps whose mean predicts the time left
        )
        self._bar.curve = LossCurve()
        self._task = self._bar.add_task("", total=num_steps, completed=first, numbers="")
        self._bar.start()

    def show(self, metrics: StepMetrics) -> None:
        """Show a finished step."""
        step = metrics.step
        last = self._num_steps
        has_bar = not self._bar.disable
        self._bar.curve.add(metrics.loss)
        self._bar.update(self._task, completed=step)
        numbers = f"{_numbers(metrics, brief=True)}  {self._times(brief=True)}"
        self._bar.update(self._task, numbers=numbers)
        evaluated = bool(metrics.validation)
        if evaluated or (not has_bar and (step % self._every == 0 or step in (1, last))):
            of_day = "" if has_bar else time.strftime("%H:%M:%S  ")
            line = f"step {step:>{len(str(last))}}/{last}  {_numbers(metrics)}"
            self.say(f"{of_day}{line}  {self._times()}")

    def _times(self, brief: bool = False) -> str:
        """Return the time since the start and the time left, as text."""
        task = self._bar.tasks[self._task]
        elapsed = in_words(task.elapsed or 0.0)
        if task.finished:
            return elapsed
        if not task.speed:  # the first step also compiles: nothing can be told from it
            return elapsed if brief else f"{elapsed} elapsed"
        left = in_words((task.remaining or 0.0) / task.speed)
        return f"{elapsed}<{left}" if brief else f"{elapsed} elapsed, {left} left"

    def say(self, text: str) -> None:
        """Print a line of text."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Stop the display and restore the terminal."""
        self._bar.stop()


_LONGEST = 86400 * 10**6  # seconds; Python's timedelta ends at 10**9 days


def in_words(seconds: float) -> str:
    """Return a number of seconds as text: 0:03:05, or 3 days, 4:00:00."""
    if seconds > _LONGEST:
        return f"more than {_LONGEST // 86400:,} days"
    return str(timedelta(seconds=round(seconds)))


def _numbers(metrics: StepMetrics, brief: bool = False) -> str:
    """Return the numbers of a step as text; `brief` fits beside a bar in 80 columns."""
    loss = f"loss {metrics.loss:.4f}"
    speed = f"{metrics.tokens_per_second:,.0f} tokens/s  MFU {percent(metrics.mfu)}"
    if brief:
        return f"{loss}  {speed}"
    sets = [f"{name.replace('_', '-')} {x.loss:.4f}" for name, x in metrics.validation.items()]
    return "  ".join([loss, *sets, f"norm {metrics.grad_norm:.3f}  lr {metrics.lr:.1e}", speed])


def percent(share: float | None) -> str:
    """Return a fraction as text in percent; "-" if it is not known."""
    return "-" if share is None else f"{100 * share:.1f} %"
