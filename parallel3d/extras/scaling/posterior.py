"""The loss of the best run of a budget, L*(C) = E + A C^-gamma, as a posterior distribution.

Each budget's best loss is read from a curve through its sizes. For a fixed gamma the law is linear
in E and A, so their posterior is a Student-t distribution; gamma is summed over a grid. On public
ladders this forecasts better than a surface L(N, D), which has to describe every run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from parallel3d.extras.scaling.points import Array, errors_of, interval

LEAST = 4
"""The smallest number of budgets that determine the law."""
DRAWS = 4000
_FAR = np.log(4)  # distance in log(N) from the optimum from which a size counts for a fifth or less
GAMMA = (0.12, 0.7)
"""Median of gamma before the data, and standard deviation of its logarithm. Published ladders have
gammas from 0.05 (arXiv:2001.08361) to 0.15 (arXiv:2203.15556)."""


class BestLoss(NamedTuple):
    """The lowest loss of a budget.

    - `variance`: of its logarithm, divided by that of the loss of a run.
    - `squares`, `freedom`: sum of the squared residuals of its curve, and their degrees of freedom.
    - `distant`: number of runs further than a factor of 4 from the best size, which count for less.
    """

    flops: float
    loss: float
    variance: float = 1.0
    squares: float = 0.0
    freedom: float = 0.0
    distant: int = 0


@dataclass(frozen=True)
class Posterior:
    """Draws from the posterior of the law; arrays [draws].

    - `noise`: standard deviation of log(loss) between runs.
    """

    offset: Array  # E
    drop: Array  # A C^-gamma at the middle of the budgets
    gamma: Array
    noise: Array
    middle: float  # mean of log(C)

    def loss(self, flops: float) -> Array:
        """Return the lowest loss of a budget [draws]."""
        distance = np.log(flops) - self.middle
        return np.asarray(self.offset + self.drop * np.exp(-self.gamma * distance))

    def run(self, losses: Array, variance: float = 1.0) -> Array:
        """Return the losses [draws] of single runs, whose mean losses are `losses` [draws].

        - `variance`: of log(loss), divided by that of a run, as in `BestLoss`.
        """
        normal = np.random.default_rng(1).standard_normal(len(losses))
        return np.asarray(losses * np.exp(np.sqrt(variance) * self.noise * normal))

    def parameters(self) -> dict[str, Array]:
        """Return the draws [draws] of each parameter."""
        scale = self.drop * np.exp(self.gamma * self.middle)
        return {"E": self.offset, "A": scale, "gamma": self.gamma}


def best_loss(flops: float, logs: Array, losses: Array) -> BestLoss | None:
    """Return the lowest loss of a budget by a cubic, in which distant sizes count for less.

    - `logs`, `losses`: log(N) and log(loss) of its runs [runs], of three sizes or more.

    Returns None if the minimum is at the smallest or the largest size.
    """
    centre = logs[np.argmin(losses)]
    for _ in range(3):  # the weights depend on where the minimum is
        x = logs - centre
        weight = 1 / (1 + (x / (_FAR / np.sqrt(2))) ** 4)
        near = len(np.unique(x[weight > 0.3].round(6)))
        degree = min(3, max(2, near - 1), len(np.unique(x.round(6))) - 1)
        powers = np.vander(x, degree + 1)
        inverse = np.linalg.pinv((powers.T * weight) @ powers)
        curve = inverse @ ((powers.T * weight) @ losses)
        grid = np.linspace(max(x.min(), -1.5), min(x.max(), 1.5), 401)
        values = np.polyval(curve, grid)
        lowest = int(np.argmin(values))
        centre += grid[lowest]
    if lowest in (0, len(grid) - 1):
        return None
    # The weights keep distant sizes from bending the curve: the noise of all runs is the same.
    twice = (powers.T * weight**2) @ powers
    at = np.vander(grid[[lowest]], degree + 1)[0]
    residual = losses - powers @ curve
    return BestLoss(
        flops,
        float(np.exp(values[lowest])),
        float(at @ inverse @ twice @ inverse @ at),
        float(weight @ residual**2),
        float(weight.sum() - np.trace(inverse @ twice)),
        int(np.sum(np.abs(logs - centre) > _FAR)),
    )


def posterior(bests: Sequence[BestLoss], draws: int = DRAWS) -> Posterior | None:
    """Return the posterior of the law; None for fewer than four budgets or a loss that rises.

    The priors of E, of the drop A C^-gamma at the middle budget, and of log(noise) are flat.
    """
    if len(bests) < LEAST:
        return None
    flops, loss, variance, squares, freedom, _ = np.array(bests).T
    logs = np.log(flops) - (middle := float(np.log(flops).mean()))
    weight = 1 / (variance * loss**2)
    own = 0.3 if freedom.sum() > 0.5 else 0.0  # degrees of freedom of the scatter within budgets
    noise = squares.sum() / max(freedom.sum(), 0.5)
    degrees = len(bests) - 2 + own
    low = 0.01
    high = 0.6
    for _ in range(3):  # each grid covers the gammas that the one before found likely
        gammas = np.linspace(low, high, 240)
        basis = np.exp(-gammas[:, None] * logs)  # [gammas, budgets]
        mean_basis = (basis @ weight) / weight.sum()
        mean_loss = weight @ loss / weight.sum()
        rest = basis - mean_basis[:, None]
        spread = rest**2 @ weight
        drop = rest @ (weight * loss) / spread
        residual = loss - mean_loss - drop[:, None] * rest  # [gammas, budgets]
        total = residual**2 @ weight + own * noise + 1e-24  # without noise it may be 0
        prior = np.log(gammas) + (np.log(gammas / GAMMA[0]) / GAMMA[1]) ** 2 / 2
        likelihood = -np.log(spread) / 2 - degrees / 2 * np.log(total) - prior
        share = np.exp(likelihood - likelihood.max())
        likely = np.flatnonzero(share > 1e-6)
        low = gammas[max(0, likely[0] - 1)]
        high = gammas[min(239, likely[-1] + 1)]
    random = np.random.default_rng(0)
    chosen = random.choice(len(gammas), size=draws, p=share / share.sum())
    deviation = np.sqrt(total[chosen] / random.chisquare(degrees, draws))
    normal = random.standard_normal((2, draws)) * deviation
    drops = drop[chosen] + normal[0] / np.sqrt(spread[chosen])
    offset = mean_loss + normal[1] / np.sqrt(weight.sum()) - drops * mean_basis[chosen]
    kept = (offset > 0) & (drops > 0)
    if kept.sum() < draws / 20:
        return None
    again = random.choice(np.flatnonzero(kept), size=draws)
    rows = np.where(kept, np.arange(draws), again)
    return Posterior(offset[rows], drops[rows], gammas[chosen][rows], deviation[rows], middle)


def back_test(bests: Sequence[BestLoss]) -> list[dict[str, object]]:
    """Predict the last 1, 2 and 3 budgets from those before them; skip what leaves too few.

    Each has the keys of `fit.held_out`, and "beyond", the largest FLOPs over the largest fitted
    ones, and "held", the number of forecasts whose 95 % interval contains the truth.
    """
    order = sorted(bests)
    tests = []
    for count in (1, 2, 3):
        if not (law := posterior(order[:-count])):
            continue
        rows: list[dict[str, Any]] = []
        for best in order[-count:]:
            losses = law.loss(best.flops)
            rows.append(
                {
                    "row": f"best run of {best.flops:.3g} FLOPs",
                    "predicted": float(np.median(losses)),
                    "loss": best.loss,
                    "interval": interval(law.run(losses, best.variance)),
                }
            )
        predicted, losses = np.array([[row["predicted"], row["loss"]] for row in rows]).T
        tests.append(
            {
                "points": count,
                "fitted_on": len(order) - count,
                "flops": [order[-count].flops, order[-1].flops],
                "fitted_flops": [order[0].flops, order[-count - 1].flops],
                "beyond": order[-1].flops / order[-count - 1].flops,
                "rows": rows,
                **errors_of(predicted, losses),
                "held": sum(r["interval"][0] <= r["loss"] <= r["interval"][1] for r in rows),
            }
        )
    return tests
