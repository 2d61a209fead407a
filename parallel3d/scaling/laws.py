"""Laws that are sums of power laws, and what they predict for a budget.

Each term is log-linear: log(term k) = log(coefficient k) + features[k] . exponents.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from parallel3d.scaling.points import FLOPS_PER_PARAM_AND_TOKEN, Array

Values = Mapping[str, Array | float]


@dataclass(frozen=True)
class Law:
    """Loss as a sum of power laws.

    `coefficients`: of each term, none below 0, the first the irreducible loss E. `features`: of
    (params, tokens), [points, terms, exponents]. `best`: of a law's values and a budget of FLOPs
    the (params, tokens) of least loss with C = 6ND. `optimal`: exponents of FLOPs that N and D grow
    with at the optimum. `needs`: the distinct sizes, tokens per parameter or tokens that it takes.
    """

    name: str
    formula: str
    source: str
    coefficients: tuple[str, ...]
    exponents: tuple[str, ...]
    features: Callable[[Array, Array], Array]
    best: Callable[[Values, Array | float], tuple[Array, Array]]
    optimal: Callable[[Values], tuple[Array | float, Array | float]]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of all fitted parameters."""
        return self.coefficients + self.exponents

    def loss(self, values: Values, params: Array, tokens: Array) -> Array:
        """Loss in nats per token; `values` may be arrays [draws, 1] over points [points]."""
        features = self.features(np.asarray(params), np.asarray(tokens))
        total: Array = np.zeros(())
        for k, name in enumerate(self.coefficients):
            logs = sum(
                (values[e] * features[..., k, j] for j, e in enumerate(self.exponents)),
                np.zeros(()),
            )
            total = total + values[name] * np.exp(logs)
        return total


def _parametric(params: Array, tokens: Array) -> Array:
    found = np.zeros((*np.shape(params), 3, 2))
    found[..., 1, 0] = -np.log(params)
    found[..., 2, 1] = -np.log(tokens)
    return found


def _parametric_best(v: Values, flops: Array | float) -> tuple[Array, Array]:
    """arXiv:2203.15556, equation 4."""
    total = np.asarray(v["alpha"]) + v["beta"]
    scale = (v["alpha"] * np.asarray(v["A"]) / (v["beta"] * np.asarray(v["B"]))) ** (1 / total)
    half = np.asarray(flops) / FLOPS_PER_PARAM_AND_TOKEN
    params = scale * half ** (v["beta"] / total)
    return params, half / params


def _parametric_optimal(v: Values) -> tuple[Array | float, Array | float]:
    total = v["alpha"] + v["beta"]
    return v["beta"] / total, v["alpha"] / total


def _over_training(params: Array, tokens: Array) -> Array:
    ratio = np.log(tokens / params)
    flops = np.log(FLOPS_PER_PARAM_AND_TOKEN * params * tokens)
    found = np.zeros((*np.shape(params), 3, 1))
    found[..., 1, 0] = ratio - flops
    found[..., 2, 0] = -ratio - flops
    return found


def _over_training_best(v: Values, flops: Array | float) -> tuple[Array, Array]:
    ratio = (np.asarray(v["b"]) / np.asarray(v["a"])) ** (1 / (2 * np.asarray(v["eta"])))
    params = np.sqrt(np.asarray(flops) / (FLOPS_PER_PARAM_AND_TOKEN * ratio))
    return params, ratio * params


def _halves(v: Values) -> tuple[Array | float, Array | float]:
    return 0.5 + 0 * v["eta"], 0.5 + 0 * v["eta"]


PARAMETRIC = Law(
    "parametric", "L = E + A / N^alpha + B / D^beta", "arXiv:2203.15556, approach 3",
    ("E", "A", "B"), ("alpha", "beta"), _parametric, _parametric_best, _parametric_optimal,
)  # fmt: skip
OVER_TRAINING = Law(
    "over-training", "L = E + (a M^eta + b M^-eta) C^-eta, M = D / N, C = 6 N D",
    "arXiv:2403.08540, equation 4",
    ("E", "a", "b"), ("eta",), _over_training, _over_training_best, _halves,
)  # fmt: skip
LAWS = {law.name: law for law in (PARAMETRIC, OVER_TRAINING)}
