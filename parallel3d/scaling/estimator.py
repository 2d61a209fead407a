"""Estimators of a law's parameters: the objective, and the points to start from."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np

from parallel3d.base.errors import ConfigError
from parallel3d.scaling.laws import Law
from parallel3d.scaling.points import Array, Points
from parallel3d.scaling.solve import ENOUGH, ROUGHLY, Model, Solution, huber, minimise

Kind = Literal["huber", "likelihood", "squares"]
EXPONENTS = (1e-3, 3.0)
"""Where exponents are looked for."""
GRID = (0.03, 1.5)
STARTS = {1: 16, 2: 5}  # values of each exponent in GRID, by the number of exponents
_SMALL = 20.0  # a term e^-20 of the loss is none
_SHRINK = 0.3  # of the threshold, from one stage of the likelihood to the next


@dataclass(frozen=True)
class Estimator:
    """An objective, with the stages of its minimisation.

    huber: the sum of Huber losses, threshold `delta`, of log(loss) - log(law) (arXiv:2203.15556).
    likelihood: the negative log-likelihood of log(loss) under the density that is exp(-Huber) of
    residual / scale, its scale free (as in the replication arXiv:2404.10102, with the same delta:
    least absolute deviations, nearly). squares: plain squares of loss - law (arXiv:2403.08540).
    `weighted`: each point by 1 / standard error^2 of what is fitted, their mean 1.
    """

    kind: Kind = "huber"
    delta: float = 1e-3
    weighted: bool = False

    def __str__(self) -> str:
        words = {
            "huber": f"Huber loss of log(loss), delta {self.delta:g}",
            "likelihood": f"likelihood of log(loss), Huber of free scale, delta {self.delta:g}",
            "squares": "least squares of the loss",
        }[self.kind]
        return words + ", weighted by 1 / standard error^2" * self.weighted

    def weights(self, points: Points) -> Array:
        """Weights of the points, with mean 1; ConfigError if standard errors are not known."""
        if not self.weighted:
            return np.ones(len(points))
        if points.standard_error is None:
            raise ConfigError(
                "--weighted: the standard errors of the losses are not known; name their column "
                "with --error-column, or leave --weighted out"
            )
        error = points.standard_error
        error = error if self.kind == "squares" else error / points.loss
        found: Array = (1 / error**2) / np.mean(1 / error**2)
        return found

    def minimise(self, model: Model, start: Array, weights: Array, sharp: bool = True) -> Solution:
        """Minima of the objective from starts [batch, p], weights [batch, points] or [points].

        Without `sharp` the steps end earlier, and the likelihood's kink is rounded off at a
        thousandth of the mean residual: enough for the draws of a bootstrap, and faster.
        """
        weights = np.broadcast_to(weights, (len(start), weights.shape[-1]))
        end = ENOUGH if sharp else ROUGHLY
        if self.kind == "squares":
            return minimise(model, start, weights, np.full(len(start), math.inf), end)
        # The threshold falls by stages, each from the minimum of the one before: among residuals
        # that are far above it the sum is nearly one of absolute values, with an edge at each.
        theta = start
        threshold = _mean_residual(model, theta, weights)
        while True:
            least = self._threshold(model, theta, weights, sharp)
            threshold = np.maximum(threshold, least)
            if np.all(threshold <= least * 1.01):
                break
            theta = minimise(model, theta, weights, threshold, ROUGHLY).theta
            threshold = threshold * _SHRINK
        found = minimise(model, theta, weights, threshold, end)
        value = self.objective(model, found.theta, weights)
        return Solution(found.theta, value, found.converged)

    def search(self, model: Model, starts: Array, weights: Array) -> Solution:
        """The better minimum of each start: by the stages of `minimise`, and without them.

        The stages lead past shallow minima of a small delta; the lowest may be one of those.
        """
        staged = self.minimise(model, starts, weights)
        if self.kind != "huber":
            return staged
        every = np.broadcast_to(weights, (len(starts), weights.shape[-1]))
        plain = minimise(model, starts, every, np.full(len(starts), self.delta))
        better = plain.objective < staged.objective
        return Solution(
            np.where(better[:, None], plain.theta, staged.theta),
            np.where(better, plain.objective, staged.objective),
            np.where(better, plain.converged, staged.converged),
        )

    def _threshold(self, model: Model, theta: Array, weights: Array, sharp: bool) -> Array:
        """Where the line of the Huber loss begins, in log(loss), [batch]."""
        if self.kind == "huber":
            return np.full(len(theta), self.delta)
        least = self.delta * self._scale(model, theta, weights)
        mean = _mean_residual(model, theta, weights)
        return least if sharp else np.maximum(least, 1e-3 * mean)

    def objective(self, model: Model, theta: Array, weights: Array) -> Array:
        """The objective [batch] at theta [batch, p]."""
        residual = model.target - model.value(theta)
        if self.kind != "likelihood":
            limit = np.array(math.inf if self.kind == "squares" else self.delta)
            found: Array = np.sum(weights * huber(residual, limit), axis=-1)
            return found
        scale = self._scale(model, theta, weights)
        count = np.sum(weights, axis=-1)
        # The density's integral: a normal's middle, and two exponential tails.
        d = self.delta
        area = math.sqrt(2 * math.pi) * math.erf(d / math.sqrt(2)) + 2 * math.exp(-d * d / 2) / d
        loss = np.sum(weights * huber(residual / scale[:, None], np.array(d)), axis=-1)
        total: Array = loss + count * (np.log(scale) + math.log(area))
        return total

    def _scale(self, model: Model, theta: Array, weights: Array) -> Array:
        """The scale of most likelihood for these residuals, [batch]."""
        residual = np.abs(model.target - model.value(theta))
        count = np.sum(weights, axis=-1)
        scale = self.delta * _mean_residual(model, theta, weights)
        for _ in range(30):
            pull = np.minimum(residual / scale[:, None], self.delta)
            scale = np.maximum(np.sum(weights * pull * residual, axis=-1) / count, 1e-300)
        return scale


def _mean_residual(model: Model, theta: Array, weights: Array) -> Array:
    residual = np.abs(model.target - model.value(theta))
    mean = np.sum(weights * residual, axis=-1) / np.sum(weights, axis=-1)
    floor: Array = np.maximum(mean, 1e-13)
    return floor


class SumModel:
    """A law on points, in centred and scaled coordinates, or its logarithm.

    theta: the logarithm of each term at the mean of its features, then the exponents times the
    spread of their features.
    """

    def __init__(self, law: Law, points: Points, log: bool) -> None:
        self.law, self._log, self.loss = law, log, points.loss
        self.target: Array = np.log(points.loss) if log else points.loss
        features = law.features(points.params, points.tokens)  # [points, terms, exponents]
        self.middle = features.mean(axis=0)
        centred = features - self.middle
        self.spread = np.maximum(np.sqrt((centred**2).mean(axis=0).max(axis=0)), 1e-12)
        self._centred = centred
        terms, size = len(law.coefficients), len(law.parameters)
        design = np.zeros((terms, size, len(points)))
        design[range(terms), range(terms)] = 1
        design[:, terms:] = (centred / self.spread).transpose(1, 2, 0)
        self._design = design
        # Of each term: the parameters that it has, and the products of their gradients by point.
        self._held = [np.flatnonzero(np.abs(rows).max(axis=1) > 0) for rows in design]
        self._products = [
            (rows[held, None] * rows[None, held]).reshape(len(held) ** 2, -1).T.copy()
            for rows, held in zip(design, self._held, strict=True)
        ]
        low, high = np.log(points.loss.min()), np.log(points.loss.max())
        exponents = np.array(EXPONENTS)[:, None] * self.spread
        self.lower = np.concatenate([np.full(terms, low - _SMALL), exponents[0]])
        self.upper = np.concatenate([np.full(terms, high + 3.0), exponents[1]])

    def value(self, theta: Array) -> Array:
        """The law, or its logarithm, at each point [batch, points], as Model.value defines it."""
        total: Array = np.sum(self._terms(theta), axis=0)
        fitted: Array = np.log(total) if self._log else total
        return fitted

    def expand(self, theta: Array) -> tuple[Array, Array, Callable[[Array], Array]]:
        """Value, gradient and Hessians' sum of the law, as Model.expand defines them."""
        terms = self._terms(theta)
        total: Array = np.sum(terms, axis=0)
        shares = [term / total for term in terms] if self._log else terms
        slope = np.zeros((*theta.shape, total.shape[1]))
        for share, rows, held in zip(shares, self._design, self._held, strict=True):
            for parameter in held:
                slope[:, parameter] += share * rows[parameter]

        def curvature(weight: Array) -> Array:
            found = np.zeros((len(theta), theta.shape[1], theta.shape[1]))
            for share, held, products in zip(shares, self._held, self._products, strict=True):
                square = ((weight * share) @ products).reshape(-1, len(held), len(held))
                found[:, held[:, None], held] += square
            if self._log:
                found -= (weight[:, None] * slope) @ slope.transpose(0, 2, 1)
            return found

        return (np.log(total) if self._log else total), slope, curvature

    def _terms(self, theta: Array) -> list[Array]:
        """Each term at the points, [batch, points]."""
        return [
            np.exp(theta[:, held] @ rows[held])
            for rows, held in zip(self._design, self._held, strict=True)
        ]

    def natural(self, theta: Array) -> dict[str, Array]:
        """The law's own parameters [batch] at theta [batch, p]."""
        terms = len(self.law.coefficients)
        exponents = theta[:, terms:] / self.spread
        logs = theta[:, :terms] - exponents @ self.middle.T
        found = {name: np.exp(logs[:, k]) for k, name in enumerate(self.law.coefficients)}
        return found | {name: exponents[:, j] for j, name in enumerate(self.law.exponents)}

    def theta(self, values: Mapping[str, float]) -> Array:
        """Theta [1, p] of the law's own parameters: the inverse of `natural`."""
        exponents = np.array([values[name] for name in self.law.exponents])
        logs = np.log([values[name] for name in self.law.coefficients])
        return np.concatenate([logs + self.middle @ exponents, exponents * self.spread])[None]

    def starts(self, weights: Array, each: int | None = None) -> Array:
        """Starts by variable projection: ends of a search over the exponents, from a grid.

        The coefficients are the best for the exponents, none below 0, by least squares of the
        relative errors; so the search is of one or two dimensions, without the narrow valleys in
        which exponents and coefficients trade off. `each`: starts of an exponent. [starts, p].
        """
        from scipy.optimize import minimize, nnls

        root = np.sqrt(weights) / self.loss
        goal = self.loss * root

        def inner(logs: Array) -> tuple[Array, float]:
            exponents = np.clip(np.exp(logs), *EXPONENTS)
            return nnls(np.exp(self._centred @ exponents) * root[:, None], goal)  # type: ignore[no-any-return]

        number = len(self.law.exponents)
        grid = np.log(np.geomspace(*GRID, each or STARTS[number]))
        found = []
        for start in product(grid, repeat=number):
            simplex = np.array(start) + 0.3 * np.vstack([np.zeros(number), np.eye(number)])
            # The place alone says when to stop.
            options = {"initial_simplex": simplex, "xatol": 1e-2, "fatol": np.inf, "maxfev": 150}
            end = minimize(
                lambda logs: inner(logs)[1], start, method="Nelder-Mead", options=options
            ).x
            logs = np.log(np.maximum(inner(end)[0], np.exp(-7.0) * self.loss.min()))
            exponents = np.clip(np.exp(end), *EXPONENTS)
            found.append(np.concatenate([logs, exponents * self.spread]))
        return np.array(found)
