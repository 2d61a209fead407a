"""Minimisation of a robust sum of residuals from many starts and weightings at once.

A damped Newton method with exact gradients and Hessians, in numpy, on a batch of problems that
differ in start, weights and target alone: a multi-start, or the draws of a bootstrap. Steps are
measured in the metric of the reweighted normal equations, so neither the scale of the objective
nor that of a parameter says when to stop (the published optima of arXiv:2203.15556 and of Gemstones
were left early, by a tolerance on an objective that was small).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from parallel3d.scaling.points import Array

CHUNK = 128  # problems at a time: what they hold stays in the cache
MOST_STEPS = 250
ENOUGH = 1e-11  # a step so small, in every parameter, is the last one
ROUGHLY = 1e-6  # the same for what is but a start, or one of many draws
_HOPELESS = 1e12  # damping at which no step leads down: the minimum, to rounding


class Model(Protocol):
    """A function f(theta) to be fitted; residuals are `target` - f(theta).

    `target`: [points], or [batch, points] where the problems of a batch differ in it.
    """

    target: Array
    lower: Array
    upper: Array

    def value(self, theta: Array) -> Array:
        """Values f [batch, points] at theta [batch, p]."""

    def expand(self, theta: Array) -> tuple[Array, Array, Callable[[Array], Array]]:
        """Values f, gradient [batch, p, points], and the sum of weighted Hessians as a function.

        The last gives of weights [batch, points] the weighted sum over the points, [batch, p, p].
        """


@dataclass(frozen=True)
class Solution:
    """Minima theta [batch, p], their objectives [batch], and whether each search converged."""

    theta: Array
    objective: Array
    converged: npt.NDArray[np.bool_]


def huber(residual: Array, threshold: Array) -> Array:
    """The Huber loss: r^2 / 2 up to the threshold, and a line beyond it."""
    size = np.abs(residual)
    return np.where(
        size <= threshold, 0.5 * residual * residual, threshold * (size - 0.5 * threshold)
    )


def minimise(
    model: Model, start: Array, weights: Array, threshold: Array, enough: float = ENOUGH
) -> Solution:
    """Minima of sum(weights * huber(residual, threshold)), one for each start.

    start [batch, p], weights [batch, points], threshold [batch] (inf: least squares).
    """
    chunks = [slice(i, i + CHUNK) for i in range(0, len(start), CHUNK)]
    target = np.broadcast_to(model.target, weights.shape)
    parts = [
        _newton(
            model, start[c], target=target[c], weights=weights[c], threshold=threshold[c],
            enough=enough,
        )
        for c in chunks
    ]  # fmt: skip
    return Solution(
        np.concatenate([part.theta for part in parts]),
        np.concatenate([part.objective for part in parts]),
        np.concatenate([part.converged for part in parts]),
    )


def _objective(fitted: Array, target: Array, weights: Array, threshold: Array) -> Array:
    """The sum of weighted Huber losses that `minimise` minimises, [batch]."""
    found: Array = np.sum(weights * huber(target - fitted, threshold[:, None]), axis=1)
    return found


def _newton(
    model: Model, start: Array, *, target: Array, weights: Array, threshold: Array, enough: float
) -> Solution:
    theta = np.clip(start, model.lower, model.upper)
    value = _objective(model.value(theta), target, weights, threshold)
    damping = np.full(len(theta), 1e-3)
    converged = np.zeros(len(theta), dtype=bool)
    open_ = np.arange(len(theta))
    for _ in range(MOST_STEPS):
        if not len(open_):
            break
        here, weight, limit = theta[open_], weights[open_], threshold[open_]
        goal = target[open_]
        step = _step(
            model, here, target=goal, weights=weight, threshold=limit, damping=damping[open_]
        )
        there = np.clip(here + step, model.lower, model.upper)
        moved = np.max(np.abs(there - here), axis=1)
        new = _objective(model.value(there), goal, weight, limit)
        better = new < value[open_]
        theta[open_[better]] = there[better]
        value[open_[better]] = new[better]
        damping[open_] = np.where(better, damping[open_] / 10, damping[open_] * 8 + 1e-8)
        damping[open_] = np.where(damping[open_] < 1e-12, 0, damping[open_])
        ends = (moved < enough) | (damping[open_] > _HOPELESS)
        converged[open_[ends]] = True
        open_ = open_[~ends]
    return Solution(theta, value, converged)


def _step(
    model: Model, theta: Array, *, target: Array, weights: Array, threshold: Array, damping: Array
) -> Array:
    """Newton's step, damped, in the metric of the reweighted normal equations: [batch, p]."""
    fitted, slope, curvature = model.expand(theta)
    residual = target - fitted
    limit = threshold[:, None]
    size = np.abs(residual)
    inside = size <= limit
    pull = weights * np.clip(residual, -limit, limit)
    share = np.minimum(1.0, limit / np.maximum(size, 1e-300))
    across = slope.transpose(0, 2, 1)
    gradient = -(slope @ pull[..., None])[..., 0]
    metric = ((weights * share)[:, None] * slope) @ across
    hessian = ((weights * inside)[:, None] * slope) @ across - curvature(pull)
    # A parameter at its bound that would go beyond it stays.
    held = ((theta <= model.lower) & (gradient > 0)) | ((theta >= model.upper) & (gradient < 0))
    gradient = np.where(held, 0, gradient)
    either = held[:, :, None] | held[:, None, :]
    mean = np.trace(metric, axis1=1, axis2=2) / theta.shape[1]
    scale = np.maximum(mean, 1e-300)[:, None, None] * np.eye(theta.shape[1])
    metric = np.where(either, scale, metric) + 1e-13 * scale
    hessian = np.where(either, scale, hessian)
    root = np.linalg.cholesky(metric)
    inverse = np.linalg.inv(root)
    inner = inverse @ hessian @ inverse.transpose(0, 2, 1)
    bent, axes = np.linalg.eigh((inner + inner.transpose(0, 2, 1)) / 2)
    along = np.einsum("bqp,bq->bp", axes, np.einsum("bqp,bp->bq", inverse, gradient))
    along = -along / (np.maximum(np.abs(bent), 1e-12) + damping[:, None])
    step: Array = np.einsum("bqp,bq->bp", inverse, np.einsum("bpq,bq->bp", axes, along))
    # A leap of several e-folds leaves the region that the Hessian speaks of.
    most = np.max(np.abs(step), axis=1, keepdims=True)
    step *= np.minimum(1, 2 / np.maximum(most, 1e-300))
    return step
