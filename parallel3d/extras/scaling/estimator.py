"""Laws that are sums of power laws, and estimators of their parameters.

Each term of a law is log-linear: log(term k) = log(coefficient k) + features[k] . exponents. An
estimator minimises its objective by L-BFGS-B from a grid of starts.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Literal, NamedTuple, Protocol

import numpy as np

from parallel3d.base.errors import ConfigError
from parallel3d.extras.scaling.points import FLOPS_PER_ND, Array, Points

Values = Mapping[str, Array | float]
EXPONENTS = (1e-3, 3.0)
"""Bounds of all exponents."""


@dataclass(frozen=True)
class Law:
    """The loss as a sum of power laws."""

    name: str
    formula: str
    source: str
    coefficients: tuple[str, ...]
    """Names of the coefficients, one per term; the first is the irreducible loss E."""
    exponents: tuple[str, ...]
    features: Callable[[Array, Array], Array]
    """(params, tokens) -> features [points, terms, exponents]."""
    best: Callable[[Values, Array | float], tuple[Array, Array]]
    """(parameters of the law, FLOPs) -> the params and tokens with the lowest loss."""
    optimal: Callable[[Values], tuple[Array | float, Array | float]]
    """Parameters of the law -> exponents with which the best params and tokens grow with FLOPs."""
    needs: Mapping[str, int] = field(default_factory=dict)
    """Quantity -> number of different values that a fit needs, as `fit.check` counts them."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of all fitted parameters."""
        return self.coefficients + self.exponents

    def loss(self, values: Values, params: Array, tokens: Array) -> Array:
        """Return the loss in nats per token [points].

        - `values`: the law's parameters, or arrays [draws, 1] of them for a loss [draws, points].
        """
        features = self.features(np.asarray(params), np.asarray(tokens))
        total: Array = np.zeros(())
        for k, name in enumerate(self.coefficients):
            logs = [values[e] * features[..., k, j] for j, e in enumerate(self.exponents)]
            total = total + values[name] * np.exp(sum(logs))
        return total


def features_of(*terms: tuple[Array | float, ...]) -> Array:
    """Return features [points, terms, exponents], with zeros for the first term, E.

    terms: for each other term, the factor of each exponent.
    """
    rows = np.broadcast_arrays(*(np.asarray(value, dtype=float) for row in terms for value in row))
    features = np.stack(rows, axis=-1).reshape(*rows[0].shape, len(terms), len(terms[0]))
    return np.concatenate([np.zeros_like(features[..., :1, :]), features], axis=-2)


def _parametric(params: Array, tokens: Array) -> Array:
    return features_of((-np.log(params), 0.0), (0.0, -np.log(tokens)))


def _parametric_best(v: Values, flops: Array | float) -> tuple[Array, Array]:
    """Return the best params and tokens by arXiv:2203.15556, equation 4."""
    total = np.asarray(v["alpha"]) + v["beta"]
    scale = (v["alpha"] * np.asarray(v["A"]) / (v["beta"] * np.asarray(v["B"]))) ** (1 / total)
    half = np.asarray(flops) / FLOPS_PER_ND
    params = scale * half ** (v["beta"] / total)
    return params, half / params


def _parametric_optimal(v: Values) -> tuple[Array | float, Array | float]:
    total = v["alpha"] + v["beta"]
    return v["beta"] / total, v["alpha"] / total


def _over_training(params: Array, tokens: Array) -> Array:
    ratio = np.log(tokens / params)
    flops = np.log(FLOPS_PER_ND * params * tokens)
    return features_of((ratio - flops,), (-ratio - flops,))


def _over_training_best(v: Values, flops: Array | float) -> tuple[Array, Array]:
    ratio = (np.asarray(v["b"]) / np.asarray(v["a"])) ** (1 / (2 * np.asarray(v["eta"])))
    params = np.sqrt(np.asarray(flops) / (FLOPS_PER_ND * ratio))
    return params, ratio * params


def _over_training_optimal(v: Values) -> tuple[Array | float, Array | float]:
    half = 0.5 + 0 * v["eta"]  # for each draw of eta
    return half, half


PARAMETRIC = Law(
    name="parametric",
    formula="L = E + A / N^alpha + B / D^beta",
    source="arXiv:2203.15556, approach 3",
    coefficients=("E", "A", "B"),
    exponents=("alpha", "beta"),
    features=_parametric,
    best=_parametric_best,
    optimal=_parametric_optimal,
    needs={"model sizes": 3, "numbers of tokens": 3, "FLOP budgets": 2},
)
OVER_TRAINING = Law(
    name="over-training",
    formula="L = E + (a M^eta + b M^-eta) C^-eta, M = D / N, C = 6 N D",
    source="arXiv:2403.08540, equation 4",
    coefficients=("E", "a", "b"),
    exponents=("eta",),
    features=_over_training,
    best=_over_training_best,
    optimal=_over_training_optimal,
    needs={"FLOP budgets": 3, "ratios of tokens to parameters": 2},
)
LAWS = {law.name: law for law in (PARAMETRIC, OVER_TRAINING)}


class Model(Protocol):
    """A function f(theta) to fit; its residuals are `target` - f(theta)."""

    target: Array  # [points]
    lower: Array  # [p]
    upper: Array  # [p]

    def __call__(self, theta: Array) -> tuple[Array, Array]:
        """Return f [points] at theta [p] and its gradient [points, p]."""


class Solution(NamedTuple):
    """A minimum that a search ended at."""

    theta: Array  # [p]
    objective: float
    converged: bool  # False if the search ran out of steps


@dataclass(frozen=True)
class Estimator:
    """An objective and its minimisation.

    - "huber": the sum of Huber losses of log(loss) - log(law), with threshold `delta`
      (arXiv:2203.15556).
    - "likelihood": the likelihood of residual / scale under the density exp(-Huber), with a free
      scale (arXiv:2404.10102).
    - "squares": the sum of squares of loss - law (arXiv:2403.08540).
    """

    kind: Literal["huber", "likelihood", "squares"] = "huber"
    delta: float = 1e-3
    weighted: bool = False
    """Weight each point by 1 / standard error^2, normalised to a mean of 1."""

    def __str__(self) -> str:
        words = {
            "huber": f"Huber loss of log(loss), delta {self.delta:g}",
            "likelihood": f"likelihood of log(loss), Huber of free scale, delta {self.delta:g}",
            "squares": "least squares of the loss",
        }[self.kind]
        return f"{words}, weighted by 1 / standard error^2" if self.weighted else words

    def weights(self, points: Points) -> Array:
        """Return the weights of the points [points], with a mean of 1.

        Raises ConfigError if weights are wanted and standard errors are not known.
        """
        if not self.weighted:
            return np.ones(len(points))
        if points.standard_error is None:
            raise ConfigError(
                "--weighted: the standard errors of the losses are not known; name their column "
                "with --error-column, or remove --weighted"
            )
        error = points.standard_error
        error = error if self.kind == "squares" else error / points.loss
        weights: Array = (1 / error**2) / np.mean(1 / error**2)
        return weights

    def objective(
        self, model: Model, x: Array, weights: Array, threshold: float | None = None
    ) -> tuple[float, Array]:
        """Return the objective and its gradient at x.

        - `x`: theta [p], for the likelihood with log(scale) appended.
        - `threshold`: the Huber threshold to use in place of `delta`.
        """
        is_likelihood = self.kind == "likelihood"
        limit = math.inf if self.kind == "squares" else threshold or self.delta
        theta, log_scale = (x[:-1], x[-1]) if is_likelihood else (x, 0.0)
        fitted, slope = model(theta)
        residual = (model.target - fitted) / np.exp(log_scale)
        clipped = np.clip(residual, -limit, limit)
        pull = weights * clipped
        value = pull @ (residual - clipped / 2)
        gradient = -(pull @ slope) / np.exp(log_scale)
        if is_likelihood:
            # The density's integral: the middle part of a normal plus two exponential tails.
            area = math.sqrt(2 * math.pi) * math.erf(limit / math.sqrt(2))
            area += 2 * math.exp(-limit * limit / 2) / limit
            total = np.sum(weights)
            value += total * (log_scale + math.log(area))
            gradient = np.append(gradient, total - pull @ residual)
        return float(value), gradient

    def minimise(
        self, model: Model, start: Array, weights: Array, is_draw: bool = False
    ) -> Solution:
        """Search from `start` [p] and return the minimum; weights [points].

        - `is_draw`: search for one draw of a bootstrap, for which less precision is enough.
        """
        from scipy.optimize import minimize  # scipy comes with the extra `scaling`

        x = np.clip(start, model.lower, model.upper)
        low = model.lower
        high = model.upper
        thresholds = np.array([self.delta])
        scale = self.delta**-2
        if self.kind == "likelihood":
            # A small threshold has sharp kinks: approach it in stages, each from the last minimum.
            residual = float(np.mean(np.abs(model.target - model(x)[0])))
            x = np.append(x, math.log(max(residual, 1e-13)))
            scale = 1.0
            low = np.append(low, -60.0)
            high = np.append(high, 20.0)
            last = max(self.delta, 0.03) if is_draw else self.delta
            thresholds = np.geomspace(1, last, 3 if is_draw else 6)
        options = {
            "maxcor": 30,
            "ftol": 1e-12 if is_draw else 1e-15,
            "gtol": 1e-10,
            "maxfun": 20_000,
            "maxiter": 5_000,
        }
        for threshold in thresholds:

            def scaled(x: Array, threshold: float = threshold) -> tuple[float, Array]:
                value, gradient = self.objective(model, x, weights, threshold)
                return value * scale, gradient * scale  # L-BFGS-B's tolerances assume about 1

            minimum = minimize(
                scaled,
                x,
                jac=True,
                method="L-BFGS-B",
                bounds=np.column_stack([low, high]),
                options=options,
            )
            x = minimum.x
        return Solution(x[: len(start)], float(minimum.fun) / scale, minimum.status != 1)

    def search(self, model: Model, starts: Array, weights: Array) -> tuple[Solution, int]:
        """Return the best minimum from starts [starts, p], and how many starts reach it."""
        ends = [self.minimise(model, start, weights) for start in starts]
        best = min(ends, key=lambda end: end.objective)
        most = best.objective + 1e-6 * abs(best.objective)
        reached = [
            end.objective <= most or np.max(np.abs(end.theta - best.theta)) < 1e-6 for end in ends
        ]
        return best, int(sum(reached))

    def draw(self, model: Model, theta: Array, weights: Array) -> Array:
        """Return theta [draws, p] of each bootstrap draw, searched from the optimum `theta`.

        - `weights`: [draws, points].
        """
        ends = [self.minimise(model, theta, row, is_draw=True).theta for row in weights]
        return np.reshape(ends, (len(weights), len(theta)))


class SumModel:
    """A law, or its logarithm, evaluated on points in centred and scaled coordinates.

    theta: the logarithm of each term at the mean of its features, followed by the exponents
    multiplied by the spread of their features.
    """

    def __init__(self, law: Law, points: Points, log: bool) -> None:
        self.law = law
        self._log = log
        self.loss = points.loss
        self.target: Array = np.log(points.loss) if log else points.loss
        features = law.features(points.params, points.tokens)  # [points, terms, exponents]
        self.middle = features.mean(axis=0)
        self._centred = features - self.middle
        spread = np.sqrt((self._centred**2).mean(axis=0).max(axis=0))
        self.spread = np.maximum(spread, 1e-12)
        self._scaled = self._centred / self.spread
        terms = len(law.coefficients)
        low = np.log(points.loss.min())
        high = np.log(points.loss.max())
        exponents = np.array(EXPONENTS)[:, None] * self.spread
        # Terms below e^-20 of the loss count as zero.
        self.lower = np.concatenate([np.full(terms, low - 20.0), exponents[0]])
        self.upper = np.concatenate([np.full(terms, high + 3.0), exponents[1]])

    def __call__(self, theta: Array) -> tuple[Array, Array]:
        """Return the law or its logarithm [points], and its gradient [points, p]."""
        count = len(self.law.coefficients)
        terms = np.exp(theta[:count] + self._scaled @ theta[count:])  # [points, terms]
        total = terms.sum(axis=1)
        share = terms / total[:, None] if self._log else terms
        by_exponent = (share[:, None] @ self._scaled)[:, 0]  # [points, exponents]
        return (np.log(total) if self._log else total), np.hstack([share, by_exponent])

    def natural(self, theta: Array) -> dict[str, Array]:
        """Return the law's own parameters [...] at theta [..., p]."""
        terms = len(self.law.coefficients)
        exponents = theta[..., terms:] / self.spread
        logs = theta[..., :terms] - exponents @ self.middle.T
        return dict(
            zip(
                self.law.parameters,
                np.moveaxis(np.concatenate([np.exp(logs), exponents], axis=-1), -1, 0),
                strict=True,
            )
        )

    def starts(self, weights: Array, each: int | None = None) -> Array:
        """Return starting points [starts, p] on a grid with `each` values per exponent.

        The coefficients of each are fitted by non-negative least squares of the relative errors.
        """
        from scipy.optimize import nnls

        root = np.sqrt(weights) / self.loss
        number = len(self.law.exponents)
        grid = np.geomspace(0.03, 1.5, each or (16 if number == 1 else 5))
        start_points = []
        for start in product(grid, repeat=number):
            terms = np.exp(self._centred @ np.array(start)) * root[:, None]
            coefficients, _ = nnls(terms, self.loss * root)
            logs = np.log(np.maximum(coefficients, np.exp(-7.0) * self.loss.min()))
            start_points.append(np.concatenate([logs, start * self.spread]))
        return np.array(start_points)
