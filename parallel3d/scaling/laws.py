"""Laws that are sums of power laws, and the compute-optimal runs that they predict.

Each term is log-linear: log(term k) = log(coefficient k) + features[k] . exponents.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from parallel3d.scaling.points import FLOPS_PER_ND, Array

Values = Mapping[str, Array | float]


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

        values: the law's parameters, or arrays [draws, 1] of them for a loss [draws, points].
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
    ratio, flops = np.log(tokens / params), np.log(FLOPS_PER_ND * params * tokens)
    return features_of((ratio - flops,), (-ratio - flops,))


def _over_training_best(v: Values, flops: Array | float) -> tuple[Array, Array]:
    ratio = (np.asarray(v["b"]) / np.asarray(v["a"])) ** (1 / (2 * np.asarray(v["eta"])))
    params = np.sqrt(np.asarray(flops) / (FLOPS_PER_ND * ratio))
    return params, ratio * params


PARAMETRIC = Law(
    "parametric", "L = E + A / N^alpha + B / D^beta", "arXiv:2203.15556, approach 3",
    ("E", "A", "B"), ("alpha", "beta"),
    lambda params, tokens: features_of((-np.log(params), 0.0), (0.0, -np.log(tokens))),
    _parametric_best, _parametric_optimal,
    {"model sizes": 3, "numbers of tokens": 3, "FLOP budgets": 2},
)  # fmt: skip
OVER_TRAINING = Law(
    "over-training", "L = E + (a M^eta + b M^-eta) C^-eta, M = D / N, C = 6 N D",
    "arXiv:2403.08540, equation 4", ("E", "a", "b"), ("eta",), _over_training, _over_training_best,
    lambda v: (0.5 + 0 * v["eta"], 0.5 + 0 * v["eta"]),
    {"FLOP budgets": 3, "ratios of tokens to parameters": 2},
)  # fmt: skip
LAWS = {law.name: law for law in (PARAMETRIC, OVER_TRAINING)}
