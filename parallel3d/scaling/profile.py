"""IsoFLOP profiles: loss over size at one budget, and its minimum."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from parallel3d.scaling.checks import SAME_BUDGET, groups
from parallel3d.scaling.points import Array, Points

Method = Literal["akima", "parabola"]
METHODS: dict[Method, int] = {"akima": 4, "parabola": 3}
"""How the least loss of a profile is found, and how many sizes that takes."""


@dataclass(frozen=True)
class Best:
    """The best size at a budget: FLOPs, parameters, tokens, loss, and the number of sizes tried."""

    flops: float
    params: float
    tokens: float
    loss: float
    sizes: int


@dataclass(frozen=True)
class Profile:
    """The runs of one budget: their rows among the points, and the size of each.

    `logs`: of parameters, loss and tokens, [3, runs].
    """

    flops: float
    rows: npt.NDArray[np.intp]
    size: npt.NDArray[np.intp]
    logs: Array

    def least(self, method: Method, times: Array | None = None) -> Best | None:
        """The best size; None where it is not bracketed by sizes on both sides.

        parabola: through log(loss) over log(N) of all sizes. akima: an interpolation of the same,
        which follows them. Runs of one size are averaged; `times`: how often each counts.
        """
        weight = np.ones(len(self.rows)) if times is None else times
        total = np.bincount(self.size, weight)
        kept = total > 0
        if kept.sum() < METHODS[method]:
            return None
        x, y, z = (np.bincount(self.size, weight * log)[kept] / total[kept] for log in self.logs)
        found = _parabola(x, y) if method == "parabola" else _akima_least(x, y)
        if found is None:
            return None
        params, loss = np.exp(found)
        tokens = float(np.exp(np.interp(found[0], x, z)))
        return Best(self.flops, float(params), tokens, float(loss), int(kept.sum()))


def profiles(points: Points) -> list[Profile]:
    """The runs of each budget that has three sizes or more, ascending."""
    found = []
    for rows in groups(points.flops, SAME_BUDGET):
        sizes = groups(points.params[rows])
        if len(sizes) >= 3:
            label = np.zeros(len(rows), dtype=np.intp)
            for i, some in enumerate(sizes):
                label[some] = i
            columns = (points.params, points.loss, points.tokens)
            logs = np.log([column[rows] for column in columns])
            flops = float(np.exp(np.log(points.flops[rows]).mean()))
            found.append(Profile(flops, rows, label, logs))
    return found


def _parabola(x: Array, y: Array) -> tuple[float, float] | None:
    middle = x.mean()
    square, slope, offset = np.polyfit(x - middle, y, 2)
    if square <= 0 or not x[0] < (at := middle - slope / (2 * square)) < x[-1]:
        return None
    return float(at), float(offset - slope**2 / (4 * square))


def _akima_least(x: Array, y: Array) -> tuple[float, float] | None:
    """The least turn of an Akima interpolation, if it is below both ends."""
    from scipy.interpolate import Akima1DInterpolator  # of the extra `scaling`

    curve = Akima1DInterpolator(x, y)
    turns = curve.derivative().roots(extrapolate=False)
    turns = turns[np.isfinite(turns)]
    values = curve(turns)
    if not len(turns) or not values.min() < min(y[0], y[-1]):
        return None
    best = int(np.argmin(values))
    return float(turns[best]), float(values[best])
