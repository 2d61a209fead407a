"""A small curve of the training loss for the terminal."""

from collections.abc import Iterator, Sequence
from math import isfinite
from statistics import fmean

from rich.console import Console, ConsoleOptions

_ROWS, _COLUMNS, _LABEL = 6, 64, 8
_DOTS = ((0x1, 0x2, 0x4, 0x40), (0x8, 0x10, 0x20, 0x80))  # of a braille character, by its columns


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
    low, high = min(values), max(values)
    cells = [[0] * -(-len(values) // 2) for _ in range(_ROWS)]
    last = 4 * _ROWS - 1
    for column, value in enumerate(values):
        place = round((high - value) / ((high - low) or 1.0) * last)  # from the top
        cells[place // 4][column // 2] |= _DOTS[column % 2][place % 4]
    labels = {0: f"{high:.3f}", _ROWS - 1: f"{low:.3f}"}
    return [
        f"{labels.get(number, ''):>{_LABEL}} ┤{''.join(chr(0x2800 + dots) for dots in row)}"
        for number, row in enumerate(cells)
    ]
