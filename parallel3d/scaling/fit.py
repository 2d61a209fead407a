"""Fit of a sum of power laws to points, with intervals and evidence against it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from parallel3d.base.errors import ConfigError
from parallel3d.scaling.estimator import EXPONENTS, Estimator, Model, SumModel
from parallel3d.scaling.laws import Law
from parallel3d.scaling.points import SAME, SAME_BUDGET, Array, Points, groups
from parallel3d.scaling.result import Fit

SINGULAR = 1e9
"""Condition of the normalised gradients beyond which the points do not tell the parameters."""
MISFIT = 0.05
"""Residuals of log(loss), rms, beyond which a law is no description; seeds differ by 0.001."""
_POOR = 1e3
_HELD_OUT = 0.1  # of the points, at least, are held out for the check on the largest budgets


def fit_law(
    points: Points, law: Law, estimator: Estimator, *,
    draws: int = 2000, seed: int = 0, brief: bool = False,
) -> Fit:  # fmt: skip
    """Return the law's parameters with bootstrap intervals and diagnostics.

    `draws`: resamples of the runs. `brief`: without the check on held-out budgets, a fit of its
    own. Raises ConfigError where the points cannot tell the parameters.
    """
    check(points, law)
    model, weights = _model(points, law, estimator), estimator.weights(points)
    starts = model.starts(weights)
    best, reached = estimator.search(model, starts, weights)
    values = _natural(model, best.theta)
    hit = bounds_hit(model, best.theta, law.parameters)
    if gone := [name for name in hit if name in law.coefficients[1:]]:
        raise ConfigError(
            f"{len(points)} points: the term of {gone[0]} in {law.formula} comes out as 0: they "
            "show no fall of the loss that it could stand for; add runs that differ more in size "
            "and tokens, or see what is wrong with these"
        )
    condition = condition_of(model, best.theta, weights)
    if not hit and condition > SINGULAR:
        raise ConfigError(
            f"{len(points)} points: they do not tell the {law.name} law's parameters (condition "
            f"{condition:.1e}); add runs of other sizes and lengths"
        )
    samples, redrawn = _bootstrap(points, model, estimator, best.theta, weights, draws, seed)
    scatter = np.log(points.loss / law.loss(values, points.params, points.tokens))
    exponents = law.optimal(values)
    drawn = dict(zip("ND", map(np.asarray, law.optimal(samples)), strict=True)) if samples else {}
    diagnostics: dict[str, Any] = {
        "starts": {"number": len(starts), "reached": reached},
        "converged": best.converged,
        "bounds_hit": hit,
        "condition": condition,
        "bootstrap": {"draws": len(drawn["N"]) if drawn else 0, "seed": seed, "redrawn": redrawn},
        "residuals": residuals(points, scatter),
        "held_out": None if brief else held_out(points, law, estimator),
        "noise_floor": noise_floor(points),
        "data": {
            "sha256": points.digest, "columns": dict(points.columns),
            "flops": [float(points.flops.min()), float(points.flops.max())],
        },
    }  # fmt: skip
    diagnostics["warnings"] = _warnings(points, law, diagnostics, draws, brief)
    return Fit(
        law=law.name, estimator=str(estimator), parameters=values, points=points,
        objective=best.objective, samples=samples, scatter=scatter,
        optimal=dict(zip("ND", map(float, exponents), strict=True)),
        optimal_samples=drawn, diagnostics=diagnostics,
    )  # fmt: skip


def check(points: Points, law: Law) -> None:
    """Raise ConfigError for points of too few sizes, tokens or budgets to tell the parameters."""
    place, said = f"{len(points)} points", ""
    if points.dropped:  # the likely reason for too few
        said = ", ".join(f"{gone.row} ({gone.reason})" for gone in points.dropped[:4])
        said = f"; dropped were {said}"
    if len(points) < len(law.parameters):
        raise ConfigError(
            f"{place}: fewer than the {len(law.parameters)} parameters of the {law.name} law; add "
            f"runs{said}"
        )
    values = {
        "model sizes": points.params, "numbers of tokens": points.tokens,
        "FLOP budgets": points.flops,
        "ratios of tokens to parameters": points.tokens / points.params,
    }  # fmt: skip
    for what, least in law.needs.items():
        found = groups(values[what], SAME_BUDGET if what == "FLOP budgets" else SAME)
        if len(found) < least:
            few = ", ".join(f"{values[what][group[0]]:.4g}" for group in found[:6])
            raise ConfigError(
                f"{place}: {len(found)} of {what} ({few}); the {law.name} law needs {least} or "
                f"more; add runs with others{said}"
            )
    if np.ptp(np.log(points.loss)) < 1e-9:
        raise ConfigError(
            f"{place}: all have the loss {points.loss[0]:g}; give the loss of each run's end, with "
            "all its digits"
        )


def _model(points: Points, law: Law, estimator: Estimator) -> SumModel:
    return SumModel(law, points, log=estimator.kind != "squares")


def _natural(model: SumModel, theta: Array) -> dict[str, float]:
    return {name: float(value) for name, value in model.natural(theta).items()}


def bounds_hit(model: Model, theta: Array, names: Sequence[str]) -> list[str]:
    """Return the parameters that ended at a bound."""
    at = (theta <= model.lower + 1e-6) | (theta >= model.upper - 1e-6)
    return [name for name, is_at in zip(names, at, strict=True) if is_at]


def condition_of(model: Model, theta: Array, weights: Array) -> float:
    """Return the condition number of the gradients by parameter, each normalised to length 1."""
    slope = model(theta)[1] * np.sqrt(weights)[:, None]
    return float(np.linalg.cond(slope / np.maximum(np.linalg.norm(slope, axis=0), 1e-300)))


def _bootstrap(
    points: Points, model: SumModel, estimator: Estimator, theta: Array, weights: Array,
    draws: int, seed: int,
) -> tuple[dict[str, Array], int]:  # fmt: skip
    """Return parameters [draws] of resampled runs, and how many draws told too little.

    Those are drawn again. No parameters where most would have to be.
    """
    count, size = len(points), len(theta)
    random = np.random.default_rng(seed)
    kept: list[Array] = []
    redrawn = 0
    while len(kept) < draws:
        times = random.multinomial(count, np.full(count, 1 / count)).astype(float)
        rows = times > 0
        if rows.sum() > size and tells(points.take(rows), model.law):
            kept.append(times)
        else:
            redrawn += 1
            if redrawn > 20 + 2 * max(draws // 4, len(kept)):
                return {}, redrawn
    if not draws:
        return {}, 0
    return model.natural(estimator.draw(model, theta, np.array(kept) * weights)), redrawn


def tells(points: Points, law: Law) -> bool:
    """Return True if the points can tell the law's parameters."""
    try:
        check(points, law)
    except ConfigError:
        return False
    return True


def held_out(points: Points, law: Law, estimator: Estimator) -> dict[str, Any] | None:
    """Return relative errors on the largest budgets of a fit to the others; None if too few."""
    budgets = groups(points.flops, SAME_BUDGET)
    out: list[int] = []
    while budgets and len(out) < max(1, _HELD_OUT * len(points)):
        out += budgets.pop().tolist()
    rest = points.take(np.setdiff1d(np.arange(len(points)), out))
    if not tells(rest, law):
        return None
    largest = points.take(np.array(sorted(out)))
    model, weights = _model(rest, law, estimator), estimator.weights(rest)
    best, _ = estimator.search(model, model.starts(weights, each=3), weights)
    predicted = law.loss(_natural(model, best.theta), largest.params, largest.tokens)
    rows = zip(largest.names, predicted.tolist(), largest.loss.tolist(), strict=True)
    errors = predicted / largest.loss - 1
    return {
        "points": len(largest), "fitted_on": len(rest),
        "flops": [float(largest.flops.min()), float(largest.flops.max())],
        "fitted_flops": [float(rest.flops.min()), float(rest.flops.max())],
        "mean_error": float(np.mean(np.abs(errors))), "bias": float(np.mean(errors)),
        "worst_error": float(np.max(np.abs(errors))),
        "rows": [dict(zip(("row", "predicted", "loss"), row, strict=True)) for row in rows],
    }  # fmt: skip


def noise_floor(points: Points) -> dict[str, Any] | None:
    """Return the pooled scatter of log(loss) among runs of equal size and tokens, if any."""
    unique = points.tokens if points.unique is None else points.unique
    keys = np.column_stack([points.params, points.tokens, unique])
    _, group, counts = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    if (repeated := counts > 1).sum() == 0:
        return None
    logs, group = np.log(points.loss), np.ravel(group)
    rest = logs - (np.bincount(group, logs) / counts)[group]
    deviation = np.sqrt((rest @ rest) / (counts - 1).sum())
    return {
        "groups": int(repeated.sum()), "runs": int(counts[repeated].sum()),
        "standard_deviation": float(deviation),
    }  # fmt: skip


def residuals(points: Points, scatter: Array) -> dict[str, Any]:
    """Return the root mean square of log(loss) - log(law), and its largest absolute value."""
    worst = int(np.argmax(np.abs(scatter)))
    return {
        "rms": float(np.sqrt(np.mean(scatter**2))),
        "worst": float(scatter[worst]), "worst_row": points.names[worst],
    }  # fmt: skip


def misfit(rest: dict[str, Any]) -> list[str]:
    """Return a warning about residuals that no noise of training explains."""
    if rest["rms"] < MISFIT:
        return []
    return [f"residuals of {rest['rms']:.1%} (rms): the law does not describe these runs"]


def _warnings(
    points: Points, law: Law, found: dict[str, Any], draws: int, brief: bool
) -> list[str]:
    starts, condition, (low, high) = found["starts"], found["condition"], EXPONENTS
    bounds = {
        name: "0" if name in law.coefficients else f"a bound ({low:g} or {high:g})"
        for name in found["bounds_hit"]
    }
    said = {
        f"{starts['reached']} of {starts['number']} starts reached the optimum: there are others "
        "nearly as good, or it is flat": starts["reached"] < starts["number"] // 4,
        "the optimum had not converged when the steps ran out": not found["converged"],
        f"condition {condition:.1e}: parameters trade off against each other; read the intervals, "
        "not the values": condition > _POOR,
        f"no intervals: {len(points)} points are too few to resample for {len(law.parameters)} "
        "parameters": draws and not found["bootstrap"]["draws"],
        "no check on held-out budgets: the rest would be too few to fit":
            found["held_out"] is None and not brief,
        "the budgets span less than a factor of 10: a forecast beyond them is a guess":
            points.flops.max() < 10 * points.flops.min(),
    }  # fmt: skip
    return [
        *(f"{name} ended at {bound}: the points do not tell it" for name, bound in bounds.items()),
        *misfit(found["residuals"]), *(text for text, is_true in said.items() if is_true),
    ]  # fmt: skip
