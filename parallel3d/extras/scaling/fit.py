"""Fit a sum of power laws to points, with intervals and diagnostics."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from parallel3d.base.errors import ConfigError
from parallel3d.base.reader import JsonObject
from parallel3d.extras.scaling.estimator import EXPONENTS, Estimator, Law, Model, SumModel
from parallel3d.extras.scaling.points import (
    SAME,
    SAME_BUDGET,
    Array,
    Fit,
    Points,
    errors_of,
    groups,
)


def fit_law(
    points: Points,
    law: Law,
    estimator: Estimator,
    *,
    draws: int = 2000,
    seed: int = 0,
    brief: bool = False,
) -> Fit:
    """Fit a law's parameters, with bootstrap intervals and diagnostics.

    - `draws`: number of bootstrap resamples of the runs.
    - `brief`: skip the held-out check on the largest budgets, which takes a second fit.

    Raises ConfigError if the points do not determine the parameters.
    """
    check(points, law)
    model = SumModel(law, points, estimator.kind != "squares")
    weights = estimator.weights(points)
    starts = model.starts(weights)
    best, reached = estimator.search(model, starts, weights)
    values = _natural(model, best.theta)
    hit = bounds_hit(model, best.theta, law.parameters)
    if vanished := [name for name in hit if name in law.coefficients[1:]]:
        raise ConfigError(
            f"{len(points)} points: the term of {vanished[0]} in {law.formula} comes out as 0, "
            "because the loss does not fall as this term predicts; add runs that differ more in "
            "size and tokens, or check these"
        )
    condition = condition_of(model, best.theta, weights)
    if not hit and condition > 1e9:
        raise ConfigError(
            f"{len(points)} points: do not determine the parameters of the {law.name} law "
            f"(condition number {condition:.1e}); add runs of other sizes and lengths"
        )
    samples, redrawn = _bootstrap(points, model, estimator, best.theta, weights, draws, seed)
    scatter = np.log(points.loss / law.loss(values, points.params, points.tokens))

    drawn = dict(zip("ND", map(np.asarray, law.optimal(samples)), strict=True)) if samples else {}
    diagnostics: JsonObject = {
        "starts": {"number": len(starts), "reached": reached},
        "converged": best.converged,
        "bounds_hit": hit,
        "condition": condition,
        "bootstrap": {"draws": len(drawn["N"]) if drawn else 0, "seed": seed, "redrawn": redrawn},
        "residuals": residuals(points, scatter),
        "held_out": None if brief else held_out(points, law, estimator),
        "noise_floor": noise_floor(points),
        "data": {
            "sha256": points.digest,
            "columns": dict(points.columns),
            "flops": [float(points.flops.min()), float(points.flops.max())],
        },
    }
    diagnostics["warnings"] = _warnings(points, law, diagnostics, draws, brief)
    return Fit(
        law=law.name,
        estimator=str(estimator),
        parameters=values,
        points=points,
        objective=best.objective,
        samples=samples,
        scatter=scatter,
        optimal=dict(zip("ND", map(float, law.optimal(values)), strict=True)),
        optimal_samples=drawn,
        diagnostics=diagnostics,
    )


def check(points: Points, law: Law) -> None:
    """Raise ConfigError if there are too few runs, sizes, token counts or budgets for a law."""
    place = f"{len(points)} points"
    dropped = ""
    if points.dropped:  # the likely reason why there are too few
        dropped = ", ".join(f"{row.row} ({row.reason})" for row in points.dropped[:4])
        dropped = f"; dropped rows: {dropped}"
    if len(points) < len(law.parameters):
        raise ConfigError(
            f"{place}: fewer than the {len(law.parameters)} parameters of the {law.name} law; add "
            f"runs{dropped}"
        )
    values = {
        "model sizes": points.params,
        "numbers of tokens": points.tokens,
        "FLOP budgets": points.flops,
        "ratios of tokens to parameters": points.tokens / points.params,
    }
    for what, least in law.needs.items():
        distinct = groups(values[what], SAME_BUDGET if what == "FLOP budgets" else SAME)
        if len(distinct) < least:
            few = ", ".join(f"{values[what][group[0]]:.4g}" for group in distinct[:6])
            raise ConfigError(
                f"{place}: {len(distinct)} different {what} ({few}); the {law.name} law needs "
                f"{least} or more; add runs with others{dropped}"
            )
    if np.ptp(np.log(points.loss)) < 1e-9:
        raise ConfigError(
            f"{place}: all have the same loss, {points.loss[0]:g}; use the final loss of each run, "
            "with all its digits"
        )


def _natural(model: SumModel, theta: Array) -> dict[str, float]:
    return {name: float(value) for name, value in model.natural(theta).items()}


def bounds_hit(model: Model, theta: Array, names: Sequence[str]) -> list[str]:
    """Return the names of the parameters that ended at a bound."""
    at = (theta <= model.lower + 1e-6) | (theta >= model.upper - 1e-6)
    return [name for name, is_at in zip(names, at, strict=True) if is_at]


def condition_of(model: Model, theta: Array, weights: Array) -> float:
    """Return the condition number of the gradient [points, p] with columns of length 1."""
    slope = model(theta)[1] * np.sqrt(weights)[:, None]
    return float(np.linalg.cond(slope / np.maximum(np.linalg.norm(slope, axis=0), 1e-300)))


def _bootstrap(
    points: Points,
    model: SumModel,
    estimator: Estimator,
    theta: Array,
    weights: Array,
    draws: int,
    seed: int,
) -> tuple[dict[str, Array], int]:
    """Return the parameters of each resample [draws], and the number of resamples drawn again.

    A resample that does not determine the parameters is drawn again. If most of them do not,
    return no parameters.
    """
    count = len(points)
    size = len(theta)
    random = np.random.default_rng(seed)
    draw_counts: list[Array] = []
    redrawn = 0
    while len(draw_counts) < draws:
        times = random.multinomial(count, np.full(count, 1 / count)).astype(float)
        rows = times > 0
        if rows.sum() > size and tells(points.take(rows), model.law):
            draw_counts.append(times)
        else:
            redrawn += 1
            if redrawn > 20 + 2 * max(draws // 4, len(draw_counts)):
                return {}, redrawn
    if not draws:
        return {}, 0
    return model.natural(estimator.draw(model, theta, np.array(draw_counts) * weights)), redrawn


def tells(points: Points, law: Law) -> bool:
    """Return True if `check` accepts the points."""
    try:
        check(points, law)
    except ConfigError:
        return False
    return True


def held_out(points: Points, law: Law, estimator: Estimator) -> JsonObject | None:
    """Fit the smaller budgets and return the relative errors on the largest.

    Returns None if the smaller budgets do not determine the law.
    """
    budgets = groups(points.flops, SAME_BUDGET)
    out: list[int] = []
    while budgets and len(out) < max(1, 0.1 * len(points)):
        out += budgets.pop().tolist()
    rest = points.take(np.setdiff1d(np.arange(len(points)), out))
    if not tells(rest, law):
        return None
    largest = points.take(np.array(sorted(out)))
    model = SumModel(law, rest, estimator.kind != "squares")
    weights = estimator.weights(rest)
    best, _ = estimator.search(model, model.starts(weights, each=3), weights)
    predicted = law.loss(_natural(model, best.theta), largest.params, largest.tokens)
    rows = zip(largest.names, predicted.tolist(), largest.loss.tolist(), strict=True)
    return {
        "points": len(largest),
        "fitted_on": len(rest),
        "flops": [float(largest.flops.min()), float(largest.flops.max())],
        "fitted_flops": [float(rest.flops.min()), float(rest.flops.max())],
        **errors_of(predicted, largest.loss),
        "rows": [dict(zip(("row", "predicted", "loss"), row, strict=True)) for row in rows],
    }


def noise_floor(points: Points) -> JsonObject | None:
    """Return the pooled scatter of log(loss) among runs of equal size and tokens.

    Returns None if no two runs are equal.
    """
    keys = np.column_stack([points.params, points.tokens, points.known_unique])
    _, group, counts = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    if (repeated := counts > 1).sum() == 0:
        return None
    logs = np.log(points.loss)
    group = np.ravel(group)
    rest = logs - (np.bincount(group, logs) / counts)[group]
    deviation = np.sqrt((rest @ rest) / (counts - 1).sum())
    return {
        "groups": int(repeated.sum()),
        "runs": int(counts[repeated].sum()),
        "standard_deviation": float(deviation),
    }


def residuals(points: Points, scatter: Array) -> JsonObject:
    """Return the root mean square and the worst of `scatter`, which is log(loss) - log(law)."""
    worst = int(np.argmax(np.abs(scatter)))
    return {
        "rms": float(np.sqrt(np.mean(scatter**2))),
        "worst": float(scatter[worst]),
        "worst_row": points.names[worst],
    }


def misfit(summary: dict[str, Any]) -> list[str]:
    """Return a warning if the residuals are larger than training noise explains.

    - `summary`: as `residuals` returns it.
    """
    if summary["rms"] < 0.05:  # the scatter between seeds is about 0.001
        return []
    return [f"residuals of {summary['rms']:.1%} (rms): the law does not describe these runs"]


def _warnings(
    points: Points, law: Law, diagnostics: dict[str, Any], draws: int, brief: bool
) -> list[str]:
    starts = diagnostics["starts"]
    condition = diagnostics["condition"]
    (low, high) = EXPONENTS
    bounds = {
        name: "0" if name in law.coefficients else f"a bound ({low:g} or {high:g})"
        for name in diagnostics["bounds_hit"]
    }
    conditions = {
        f"only {starts['reached']} of {starts['number']} starts reached the optimum: it is flat, "
        "or others are nearly as good": starts["reached"] < starts["number"] // 4,
        "the search ran out of steps before it converged": not diagnostics["converged"],
        f"condition number {condition:.1e}: parameters trade off against each other; read the "
        "intervals, not the values": condition > 1e3,
        f"no intervals: {len(points)} points are too few to resample for {len(law.parameters)} "
        "parameters": draws and not diagnostics["bootstrap"]["draws"],
        "no held-out check on the largest budgets: the other runs are too few to fit": diagnostics[
            "held_out"
        ]
        is None
        and not brief,
    }
    return [
        *(
            f"{name} ended at {bound}: the points do not determine it"
            for name, bound in bounds.items()
        ),
        *misfit(diagnostics["residuals"]),
        *(text for text, is_true in conditions.items() if is_true),
    ]
