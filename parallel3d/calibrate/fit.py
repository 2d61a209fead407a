"""Least-squares fits of a machine's curves to its measurements."""

from collections.abc import Callable, Mapping, Sequence
from math import exp, isfinite, log

import numpy as np

Bounds = tuple[float, float]
_PRIOR = 0.05  # how much a parameter that nothing determines stays where it was
_STEP = 1e-4
_MOST = 40


def fit_line(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Latency and bandwidth of (bytes, seconds): seconds = latency + bytes / bandwidth.

    Least squares of relative errors, so that microseconds count as much as milliseconds; neither
    is negative. Raises ValueError for fewer than two sizes.
    """
    if len({size for size, _ in rows}) < 2:
        raise ValueError("a line needs two sizes")
    sizes, seconds = np.array(rows, dtype=float).T
    design = np.stack([1 / seconds, sizes / seconds], axis=1)
    latency, per_byte = np.linalg.lstsq(design, np.ones(len(rows)), rcond=None)[0]
    if latency <= 0:  # bandwidth alone
        ratios = sizes / seconds
        return 0.0, float((ratios * ratios).sum() / ratios.sum())
    if per_byte <= 0:  # too small to show a bandwidth: the largest says the least that it is
        return float(np.exp(np.log(seconds).mean())), float((sizes / seconds).max())
    return float(latency), float(1 / per_byte)


def fit(
    start: Mapping[str, float],
    bounds: Mapping[str, Bounds],
    predict: Callable[[Mapping[str, float]], Sequence[float]],
    measured: Sequence[float],
) -> dict[str, float]:
    """The positive parameters within `bounds` whose predictions are nearest to `measured`.

    Least squares of log(predicted / measured) by Levenberg and Marquardt's method, over the
    logarithms of the parameters; each is drawn a little to its start, so that what the
    measurements do not determine stays.
    """
    names = list(bounds)
    low, high = (np.log([bounds[name][i] for name in names]) for i in (0, 1))
    origin = np.clip(np.log([max(start[name], 1e-12) for name in names]), low, high)
    wanted = np.log(np.asarray(measured, dtype=float))

    def residuals(x: np.ndarray) -> np.ndarray:
        values = {name: exp(value) for name, value in zip(names, x, strict=True)}
        predicted = np.asarray(predict({**start, **values}), dtype=float)
        return np.concatenate([np.log(predicted) - wanted, _PRIOR * (x - origin)])

    x, damping = origin, 1e-2
    now = residuals(x)
    for _ in range(_MOST):
        moved = [residuals(x + _STEP * row) for row in np.eye(len(names))]
        jacobian = np.stack([(there - now) / _STEP for there in moved], axis=1)
        normal = jacobian.T @ jacobian
        change = np.linalg.solve(normal + damping * np.eye(len(names)), -jacobian.T @ now)
        candidate = np.clip(x + np.clip(change, -1, 1), low, high)
        there = residuals(candidate)
        better = float(there @ there) < float(now @ now)
        if better:
            gained = float(now @ now) - float(there @ there)
            x, now, damping = candidate, there, damping / 3
            if gained < 1e-9:
                break
        else:
            damping *= 5
            if damping > 1e8:
                break
    return {**start, **{name: exp(value) for name, value in zip(names, x, strict=True)}}


def typical(ratios: Sequence[float]) -> float:
    """The geometric mean of some values; raises ValueError where there are none."""
    logs = [log(ratio) for ratio in ratios if ratio > 0 and isfinite(ratio)]
    if not logs:
        raise ValueError("no ratio to take the mean of")
    return exp(sum(logs) / len(logs))
