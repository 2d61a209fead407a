"""Fit power laws by least squares of logarithms, and find the best value of a swept setting."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parallel3d.base.errors import ConfigError
from parallel3d.scaling.points import Array, Fit, Points

NAME = "best-value"


@dataclass(frozen=True)
class Power:
    """A power law: y = coefficient * product over i of x_i^exponent_i."""

    coefficient: float
    exponents: tuple[float, ...]

    def __call__(self, *x: Array | float) -> Array:
        """Return y at x."""
        powers = [np.power(v, e) for v, e in zip(x, self.exponents, strict=True)]
        return np.asarray(self.coefficient * np.prod(powers, axis=0))


def power_law(x: Sequence[Array], y: Array, log_error: Array | None = None) -> Power:
    """Fit a power law of x to y by least squares of logarithms.

    x: one array [values] per exponent. y: [values]. log_error: standard error of each log(y), for
    weights 1 / log_error^2. Raises ConfigError if the values do not determine the exponents.
    """
    weight = np.ones(len(y)) if log_error is None else 1 / log_error
    known = np.isfinite(y) & np.isfinite(weight) & (weight > 0)
    logs = np.log(np.array([v[known] for v in x]))
    middles = logs.mean(axis=1)
    design = np.column_stack([np.ones(known.sum()), (logs - middles[:, None]).T])
    weight = weight[known]
    solution, _, rank, _ = np.linalg.lstsq(
        design * weight[:, None], np.log(y[known]) * weight, rcond=None
    )
    if rank < len(solution):
        raise ConfigError(
            f"{known.sum()} values: too few or too similar for a power law with {len(x)} "
            "exponents; add runs of other sizes"
        )
    return Power(float(np.exp(solution[0] - solution[1:] @ middles)), tuple(solution[1:].tolist()))


def best_values(points: Points, setting: Array) -> tuple[list[dict[str, object]], list[str]]:
    """Return the best value of a swept setting for each size and length.

    It is the vertex of a parabola through the best value and its two neighbours. The second list
    has a text for each sweep that was left out.
    """
    best_rows, left_out = [], []
    for params, tokens in np.unique(
        np.column_stack([points.params, points.tokens]), axis=0
    ).tolist():
        rows = np.flatnonzero((points.params == params) & (points.tokens == tokens))
        place = f"N = {params:.4g}, D = {tokens:.4g}"
        values = np.unique(setting[rows])
        losses = np.array([points.loss[rows[setting[rows] == v]].mean() for v in values])
        least = int(np.argmin(losses))
        if len(values) < 3:
            left_out.append(f"{place}: has {len(values)} values of the setting, needs 3 or more")
        elif least in (0, len(values) - 1):
            left_out.append(f"{place}: the best value, {values[least]:g}, is at the sweep's edge")
        else:
            near = slice(least - 1, least + 2)
            x = np.log(values[near] / values[least])
            square, slope, _ = np.polyfit(x, losses[near], 2)
            best = float(values[least] * np.exp(-slope / (2 * square)))
            best_rows.append({
                "params": params, "tokens": tokens, "best": best, "values": len(values),
                "loss": float(losses[least]),
            })  # fmt: skip
    return best_rows, left_out


def fit_best(points: Points, setting: Array, column: str, *, draws: int, seed: int) -> Fit:
    """Fit the best value of `column` as a power law of N, of D or of both (arXiv:2503.04715).

    N and D that do not vary are left out, and so is D if it is a multiple of N. Intervals are from
    a bootstrap over the pairs (N, D). Raises ConfigError if there are fewer pairs than exponents
    + 2.
    """
    best, left_out = best_values(points, setting)
    columns = {"N": "params", "D": "tokens"}
    arrays = {name: np.array([row[key] for row in best]) for name, key in columns.items()}
    names = [name for name, values in arrays.items() if len(np.unique(values)) > 1]
    if len(names) == 2 and abs(np.corrcoef(np.log([*arrays.values()]))[0, 1]) > 1 - 1e-9:
        names = ["N"]  # with a constant ratio of tokens to parameters D adds nothing
    if len(best) < len(names) + 2 or not names:
        why = f"; {left_out[0]}" if left_out else ""
        raise ConfigError(
            f"--setting-column = {column}: the best value is known for {len(best)} pairs of N and "
            f"D, but {max(3, len(names) + 2)} different ones are needed{why}; widen the sweep"
        )
    x, y = [arrays[name] for name in names], np.array([row["best"] for row in best])
    law = power_law(x, y)
    random = np.random.default_rng(seed)
    drawn = []
    for _ in range(draws):
        rows = random.integers(len(y), size=len(y))
        if all(len(np.unique(v[rows])) > 1 for v in x) and len(np.unique(rows)) > len(x) + 1:
            draw_law = power_law([v[rows] for v in x], y[rows])
            drawn.append((draw_law.coefficient, *draw_law.exponents))
    labels = ["coefficient", *(f"{name}_exponent" for name in names)]
    samples = dict(zip(labels, np.array(drawn).T, strict=True)) if drawn else {}
    scatter = np.log(y / law(*x))
    diagnostics = {
        "setting": column, "best": best, "left_out": left_out,
        "bootstrap": {"draws": len(drawn), "seed": seed, "redrawn": draws - len(drawn)},
        "warnings": [f"left out: {text}" for text in left_out],
    }  # fmt: skip
    formula = " ".join(f"{name}^{e:.4f}" for name, e in zip(names, law.exponents, strict=True))
    return Fit(
        law=NAME, estimator=f"least squares of log(best {column}): {law.coefficient:.4g} {formula}",
        parameters=dict(zip(labels, (law.coefficient, *law.exponents), strict=True)),
        objective=float(scatter @ scatter), points=points, optimal={}, samples=samples,
        scatter=scatter, diagnostics=diagnostics,
    )  # fmt: skip
