"""The best learning rate and batch of a ladder, from the runs that tune them."""

from collections.abc import Iterable
from math import exp, inf, isclose, log
from statistics import fmean

from parallel3d.base.errors import ConfigError


def best_factors(
    tried: Iterable[tuple[float, tuple[float, float], float]],
) -> tuple[float, float]:
    """Return the factors of learning rate and batch with the lowest loss, as means over budgets.

    tried: budget, both factors and loss of each run; a batch is tried with the rate times its
    square root. Raises ConfigError if the best rate has no other on one side.
    """
    rates: dict[float, list[tuple[float, float]]] = {}
    batches: dict[float, list[tuple[float, float]]] = {}
    for budget, (rate, batch), loss in tried:
        if batch == 1:
            rates.setdefault(budget, []).append((log(rate), loss))
        if isclose(rate, batch**0.5):
            batches.setdefault(budget, []).append((log(batch), loss))
    for curve in rates.values():
        curve.sort()
        if min(curve, key=lambda pair: pair[1]) in (curve[0], curve[-1]):
            raise ConfigError(
                "hyperparameters.tune.learning_rate_factors = "
                f"{[round(exp(x), 6) for x, _ in curve]}: the best one must have others on both "
                "sides; add factors beyond it, and run again"
            )
    return (
        exp(fmean(_lowest(sorted(curve)) for curve in rates.values())),
        exp(fmean(_lowest(sorted(curve)) for curve in batches.values())),
    )


def _lowest(curve: list[tuple[float, float]]) -> float:
    """Return where the parabola through the lowest point and its neighbours has its minimum.

    It is the point itself if it is the first or the last.
    """
    place = min(range(len(curve)), key=lambda i: curve[i][1])
    if place in (0, len(curve) - 1):
        return curve[place][0]
    (x0, y0), (x1, y1), (x2, y2) = curve[place - 1 : place + 2]
    left, right = (y0 - y1) / (x1 - x0), (y2 - y1) / (x2 - x1)  # slopes away from the lowest
    if not 0 < left + right < inf:  # a neighbour diverged
        return x1
    return (left * (x1 + x2) + right * (x0 + x1)) / (2 * (left + right))
