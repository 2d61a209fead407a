"""The best rate and batch of the runs that tune, compared with curves whose minimum is known."""

from math import log

import numpy as np
import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.extras.scaling.ladder.plan import best_factors

pytestmark = pytest.mark.pure

RATES = (0.25, 0.5, 1.0, 2.0, 4.0)
BATCHES = (0.5, 1.0, 2.0)


def tried(budget, rate, batch, bend=0.0):
    """The runs of one budget, whose loss is lowest at these factors."""
    pairs = [(r, 1.0) for r in RATES] + [(b**0.5, b) for b in BATCHES if b != 1]
    for r, b in pairs:
        x = log(r / b**0.5 / rate)
        y = log(b / batch)
        yield budget, (r, b), 3 + 0.2 * x**2 + bend * x**3 + 0.1 * y**2


def test_factors_are_means_over_both_budgets():
    runs = [*tried(1e10, 0.6, 0.8), *tried(2e10, 1.2, 1.25)]
    rate, batch = best_factors(runs)
    assert rate == pytest.approx((0.6 * 1.2) ** 0.5) and batch == pytest.approx(1)


def test_parabola_goes_through_the_lowest_three():
    runs = list(tried(1e10, 0.7, 1.0, bend=0.02))
    curve = [(log(r), loss) for _, (r, b), loss in runs if b == 1 and r in (0.25, 0.5, 1.0, 2.0)]
    lowest = min(range(4), key=lambda i: curve[i][1])
    x, y = np.array(curve[lowest - 1 : lowest + 2]).T
    square, slope, _ = np.polyfit(x, y, 2)
    assert log(best_factors(runs)[0]) == pytest.approx(-slope / 2 / square)


def test_best_pair_is_kept_if_its_neighbour_diverged():
    runs = [
        (budget, pair, np.inf if pair == (2.0, 1.0) else loss)
        for budget, pair, loss in tried(1e10, 1.1, 1.0)
    ]
    assert best_factors(runs)[0] == 1


def test_smallest_batch_may_be_best_but_not_the_smallest_rate():
    assert best_factors(tried(1e10, 1, 0.3))[1] == pytest.approx(0.5)
    alone = [run for run in tried(1e10, 0.9, 0.3) if run[1][1] == 1]
    assert best_factors(alone) == pytest.approx((0.9, 1)), "of one batch"
    with pytest.raises(ConfigError, match=r"factors = \[0.25, .*\]: .* add factors beyond it"):
        best_factors(tried(1e10, 0.1, 1))
