"""How sizes of activations go with the width: slopes, what of them must be flat, and a picture.

A coordinate check (arXiv:2203.03466, appendix D.1): under muP every activation, and what a few
steps of training change of it, is as large in a wide model as in a narrow one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parallel3d.scaling import style

MOST = 0.1  # of |slope| where the theory says that there is none
START, TRAINED, CHANGE = "start", "trained", "change"
LOGITS = "head.output"
Sizes = Mapping[str, Mapping[str, float]]
"""Layer -> measure -> mean |x|: at the start, after the steps, and of the change between them."""


@dataclass(frozen=True)
class Layer:
    """One layer's slopes, by measure: log size over log width, the mean over the seeds."""

    name: str
    slopes: Mapping[str, float]
    errors: Mapping[str, float]
    """By measure: the standard error of that mean; NaN of one seed."""
    sizes: Mapping[str, tuple[float, ...]]
    """By measure, for each width: the geometric mean over the seeds."""

    @property
    def claimed(self) -> tuple[str, ...]:
        """The measures that the theory says are flat.

        The first logits fall with the width, as the first weights of the output know nothing of
        what they read; only their change is claimed.
        """
        return (CHANGE,) if self.name == LOGITS else (START, TRAINED, CHANGE)

    @property
    def slope(self) -> float:
        """The steepest of those that are claimed to be flat; NaN where a size is not finite."""
        return float(self.slopes[self.steepest])

    @property
    def steepest(self) -> str:
        """The measure that has the steepest slope of those that are claimed to be flat."""
        slopes = [self.slopes[measure] for measure in self.claimed]
        return self.claimed[int(np.argmax(np.abs(slopes)))]  # of a NaN it is its place

    @property
    def flat(self) -> bool:
        """Whether none of them is steeper than the tolerance."""
        return abs(self.slope) <= MOST

    @property
    def undecided(self) -> bool:
        """Whether a slope is beyond the tolerance by less than two of its standard errors."""
        return not self.flat and all(
            abs(self.slopes[measure]) - 2 * self.errors[measure] <= MOST
            for measure in self.claimed
            if not abs(self.slopes[measure]) <= MOST
        )

    def to_json(self) -> dict[str, Any]:
        """The layer as JSON: name, steepest claimed slope, if it is flat, all slopes and sizes."""
        own = {"name": self.name, "slope": self.slope, "flat": self.flat}
        slopes = {"slopes": dict(self.slopes), "standard_errors": dict(self.errors)}
        return {**own, **slopes, "sizes": dict(self.sizes)}


@dataclass(frozen=True)
class CoordinateCheck:
    """The layers of a model at several widths."""

    widths: tuple[int, ...]
    layers: tuple[Layer, ...]
    seeds: int

    @property
    def passed(self) -> bool:
        """Whether every layer is flat that is to be."""
        return all(layer.flat for layer in self.layers)

    @property
    def undecided(self) -> bool:
        """Whether all that is not flat may be noise of the seeds; more of them would tell."""
        return not self.passed and all(layer.flat or layer.undecided for layer in self.layers)

    def to_json(self) -> dict[str, Any]:
        """What --json prints; a slope that is no number is null."""
        layers = [layer.to_json() for layer in self.layers]
        own = {"passed": self.passed, "widths": list(self.widths), "seeds": self.seeds}
        return {**own, "layers": layers}


def slopes(found: Mapping[int, Sequence[Sizes]]) -> CoordinateCheck:
    """The check of what was measured: of each width the sizes of the same number of seeds.

    All have the same layers. A size of 0, which no logarithm has, makes the slope NaN.
    """
    widths = tuple(sorted(found))
    seeds = len(found[widths[0]])
    x = np.log(np.array(widths, dtype=float))
    x -= x.mean()
    layers = []
    for name, measures in found[widths[0]][0].items():
        logs = {  # [widths, seeds]
            measure: np.array(
                [[_log(seed[name][measure]) for seed in found[width]] for width in widths]
            )
            for measure in measures
        }
        of_seeds = {measure: x @ y / (x @ x) for measure, y in logs.items()}
        layers.append(
            Layer(
                name,
                slopes={m: float(each.mean()) for m, each in of_seeds.items()},
                errors={m: _standard_error(each) for m, each in of_seeds.items()},
                sizes={m: tuple(map(float, np.exp(y.mean(1)))) for m, y in logs.items()},
            )
        )
    return CoordinateCheck(widths, tuple(layers), seeds)


def _standard_error(values: Any) -> float:
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")


def _log(size: float) -> float:
    return float(np.log(size)) if 0 < size < np.inf else float("nan")


def draw(checks: Mapping[str, CoordinateCheck]) -> bytes:
    """A PNG: a row for each check by its title, a column for each measure, a line a layer."""
    with style.style() as plt:
        titles = {START: "at the start", TRAINED: "after training", CHANGE: "change by training"}
        rows = len(checks)
        figure, grid = plt.subplots(
            rows, 3, figsize=(8.4, 2.7 * rows + 0.4), squeeze=False, sharex=True,
            constrained_layout=True,
        )  # fmt: skip
        for row, (title, check) in zip(grid, checks.items(), strict=True):
            for axes, (measure, words) in zip(row, titles.items(), strict=True):
                _lines(axes, check, measure)
                axes.set_title(f"{title}: {words}")
            row[0].set_ylabel("mean |activation|")
        for axes in grid[-1]:
            axes.set_xlabel("width")
        names = [layer.name for layer in next(iter(checks.values())).layers]
        figure.legend(
            grid[0][0].get_lines(), names, loc="outside lower center", ncols=4, fontsize=7
        )
        return style.png(plt, figure)


def _lines(axes: Any, check: CoordinateCheck, measure: str) -> None:
    import matplotlib

    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.92, len(check.layers)))
    for layer, colour in zip(check.layers, colours, strict=True):
        is_claimed = measure in layer.claimed
        line = "-" if is_claimed else ":"
        axes.plot(check.widths, layer.sizes[measure], line, color=colour, marker=".", lw=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(check.widths, [str(width) for width in check.widths])
