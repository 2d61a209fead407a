"""The data-constrained law: how much repeated tokens and excess parameters are worth.

Source: arXiv:2305.16264, section 3.1. In the parametric law, D and N are replaced by effective
values. With U_D unique tokens, repeated R_D = D / U_D - 1 times:

    D' = U_D + U_D R_D* (1 - exp(-R_D / R_D*))

N' has the same form, with U_N: the number of parameters that is optimal for U_D unique tokens.
"""

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np

from parallel3d.base.errors import ConfigError
from parallel3d.extras.scaling.estimator import PARAMETRIC, Estimator
from parallel3d.extras.scaling.fit import (
    bounds_hit,
    condition_of,
    fit_law,
    misfit,
    noise_floor,
    residuals,
)
from parallel3d.extras.scaling.points import Array, Fit, Points

NAME = "data-constrained"
DECAYS = ("R_D_star", "R_N_star")
"""R_D*: repeats after which another one is worth 1 / e of a first pass. R_N*: the same for excess
parameters."""
_LOGS = (np.log(1e-3), np.log(1e7))  # bounds of log R_D* and log R_N*
_GRID = np.log(np.geomspace(0.1, 1e4, 8))


class DecayModel:
    """The law's log(loss) as a function of theta [2] = (log R_D*, log R_N*).

    base: the parametric law's E, A, B, alpha and beta, which stay fixed.
    """

    def __init__(self, points: Points, base: Mapping[str, float]) -> None:
        if points.unique is None:
            raise ConfigError(
                "--unique-column: is missing; the data-constrained law needs the number of unique "
                "tokens of each run"
            )
        self.base = dict(base)
        self.target = np.log(points.loss)
        self.lower = np.full(2, _LOGS[0])
        self.upper = np.full(2, _LOGS[1])
        self._unique = np.minimum(points.unique, points.tokens)
        self._repeats = points.tokens / self._unique - 1
        self._fitting = np.minimum(best_params(base, self._unique), points.params)
        self._excess = points.params / self._fitting - 1

    def __call__(self, theta: Array) -> tuple[Array, Array]:
        """Return log(loss) [points] and its gradient [points, 2]."""
        base = self.base
        decays = np.exp(theta)
        by_tokens, slope_d = _term(base["B"], base["beta"], self._unique, self._repeats, decays[0])
        by_params, slope_n = _term(base["A"], base["alpha"], self._fitting, self._excess, decays[1])
        total = base["E"] + by_tokens + by_params
        return np.log(total), np.column_stack([slope_d, slope_n]) / total[:, None]


def best_params(base: Mapping[str, float], unique: Array) -> Array:
    """Return the model size for which training once on `unique` tokens is compute-optimal."""
    alpha = base["alpha"]
    beta = base["beta"]
    scale = (alpha * base["A"] / (beta * base["B"])) ** (1 / (alpha + beta))
    num_params: Array = (unique * scale) ** (beta / alpha) * scale
    return num_params


def _term(
    coefficient: float, exponent: float, first: Array, repeats: Array, decay: Array | float
) -> tuple[Array, Array]:
    """Return coefficient / worth^exponent [points] and its derivative with respect to log(decay).

    worth = first * (1 + decay (1 - exp(-repeats / decay)))
    """
    full = -decay * np.expm1(-repeats / decay)  # 1 - exp() would cancel if the decay is slow
    worth = first * (1 + full)
    term: Array = coefficient * worth**-exponent
    by_decay = first * (full - repeats * np.exp(-repeats / decay)) / worth
    return term, -exponent * term * by_decay


def loss(values: Mapping[str, Any], params: Array, tokens: Array, unique: Array) -> Array:
    """Return the loss in nats per token of runs on so many unique tokens, which are no more.

    - `values`: the law's parameters, or arrays [draws, 1] of them for a loss [draws, runs].
    """
    fitting = np.minimum(best_params(values, unique), params)
    decay_d, decay_n = (np.asarray(values[name]) for name in DECAYS)
    by_tokens, _ = _term(values["B"], values["beta"], unique, tokens / unique - 1, decay_d)
    by_params, _ = _term(values["A"], values["alpha"], fitting, params / fitting - 1, decay_n)
    return np.asarray(values["E"] + by_tokens + by_params)


def fit_decays(
    points: Points,
    estimator: Estimator,
    base: Mapping[str, float] | None = None,
    *,
    draws: int = 2000,
    seed: int = 0,
) -> Fit:
    """Fit R_D* and R_N* with bootstrap intervals; the other parameters are those of `base`.

    Without `base`, the parametric law is first fitted to the runs that repeat no tokens. Raises
    ConfigError if no run repeats tokens, or if the other runs cannot determine the base.
    """
    if estimator.kind == "squares":
        raise ConfigError(
            "--estimator = squares: is not supported by the data-constrained law; use huber"
        )
    chosen = base or _base(points, estimator)
    model = DecayModel(points, chosen)
    if not np.any(model._repeats > 1e-6):
        raise ConfigError(
            f"{len(points)} points: no run repeats its tokens; add runs of more than one epoch"
        )
    weights = estimator.weights(points)
    grid = np.array([*product(_GRID, repeat=2)])
    best, reached = estimator.search(model, grid, weights)
    count = len(points)
    times = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=draws)
    drawn = np.exp(estimator.draw(model, best.theta, times * weights))
    hit = bounds_hit(model, best.theta, DECAYS)
    fitted = model(best.theta)[0]
    raw = points.loss - np.exp(fitted)
    spread = points.loss - points.loss.mean()
    points_off = residuals(points, model.target - fitted)
    diagnostics: dict[str, Any] = {
        "base": dict(chosen),
        "base_given": base is not None,
        "starts": {"number": len(grid), "reached": reached},
        "bounds_hit": hit,
        "condition": condition_of(model, best.theta, weights),
        "converged": best.converged,
        "bootstrap": {"draws": draws, "seed": seed, "redrawn": 0},
        "r_squared": float(1 - (raw @ raw) / (spread @ spread)),
        "residuals": points_off,
        "noise_floor": noise_floor(points),
        "warnings": [f"{name} ended at a bound: the points do not determine it" for name in hit]
        + misfit(points_off),
    }
    return Fit(
        law=NAME,
        estimator=str(estimator),
        points=points,
        objective=best.objective,
        parameters=dict(zip(DECAYS, map(float, np.exp(best.theta)), strict=True)) | dict(chosen),
        samples=dict(zip(DECAYS, drawn.T, strict=True)) if draws else {},
        scatter=model.target - fitted,
        optimal=dict(zip("ND", map(float, PARAMETRIC.optimal(chosen)), strict=True)),
        diagnostics=diagnostics,
    )


def _base(points: Points, estimator: Estimator) -> dict[str, float]:
    once = points.take(points.known_unique >= points.tokens * (1 - 1e-6))
    try:
        fit = fit_law(once, PARAMETRIC, estimator, draws=0, brief=True)
    except ConfigError as problem:
        raise ConfigError(
            f"cannot fit the base of the law to the runs that repeat no tokens: {problem}; or pass "
            "--base with the fit.json of a parametric law"
        ) from None
    return dict(fit.parameters)
