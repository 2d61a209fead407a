"""The laws of the best runs, on points whose best size is known."""

import numpy as np
import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.extras.scaling.data_constrained import DECAYS, DecayModel, best_params, fit_decays
from parallel3d.extras.scaling.estimator import PARAMETRIC, Estimator
from parallel3d.extras.scaling.frontier import (
    envelope,
    fit_best,
    fit_frontier,
    law_draws,
    power_law,
    profiles,
)
from parallel3d.extras.scaling.points import interval
from tests.scaling.cases import CHINCHILLA, chinchilla, points

pytestmark = pytest.mark.pure

TRUTH = 0.28 / 0.62
SQUARES = Estimator("squares")  # for the surface beside the law: fitted fast


def isoflop(runs, method="akima", draws=0):
    return fit_frontier(runs, "isoflop", method, SQUARES, draws=draws, seed=0)


@pytest.mark.parametrize("method", ["akima", pytest.param("parabola", marks=pytest.mark.slow)])
def test_exponent_of_isoflop_profiles_is_recovered(method):
    fitted = isoflop(chinchilla(sizes=15), method)
    assert fitted.optimal["N"] == pytest.approx(TRUTH, abs=2e-3)
    assert fitted.optimal["N"] + fitted.optimal["D"] == pytest.approx(1)
    assert fitted.parameters["gamma"] == pytest.approx(0.34 * 0.28 / 0.62, rel=0.01)
    assert len(fitted.diagnostics["best"]) == 9
    held = fitted.diagnostics["held_out"]
    assert held["fitted_on"] == 8 and held["flops"][0] == pytest.approx(3e21)
    assert held["worst_error"] < 1e-3


def test_akima_finds_the_best_size_missed_by_a_parabola():
    """Lopsided profiles, sizes over a factor of 900; the bias that is printed is the true one."""
    law = CHINCHILLA | {"alpha": 0.6, "beta": 0.2, "A": 30_000.0}
    flops = np.repeat(np.geomspace(1e18, 1e21, 5), 17)
    best, _ = PARAMETRIC.best(law, flops)
    params = best * np.tile(np.geomspace(1 / 30, 30, 17), 5)
    tokens = flops / 6 / params
    runs = points(params, tokens, PARAMETRIC.loss(law, params, tokens))
    for profile in profiles(runs):
        true = float(PARAMETRIC.best(law, profile.flops)[0])
        assert profile.least("akima").params == pytest.approx(true, rel=0.02)
        assert abs(np.log(profile.least("parabola").params / true)) > 0.1
    bias = isoflop(runs).diagnostics["parabola_bias"]
    ratios = [
        p.least("parabola").params / float(PARAMETRIC.best(law, p.flops)[0]) for p in profiles(runs)
    ]
    assert bias["params_ratio"] == pytest.approx(np.exp(np.mean(np.log(ratios))), rel=1e-6)
    assert isoflop(runs, "parabola").optimal["N"] - 0.25 == pytest.approx(bias["N_exponent"])


def test_budget_without_a_bracketed_minimum_is_skipped_by_name():
    runs = chinchilla(sizes=9, budgets=4)
    cheapest = np.flatnonzero(np.isclose(runs.flops, runs.flops.min(), rtol=1e-3))
    cut = runs.take(np.setdiff1d(np.arange(len(runs)), cheapest[:6]))
    fitted = isoflop(cut)
    assert len(fitted.diagnostics["best"]) == 3
    (reason,) = fitted.diagnostics["left_out"]
    assert reason.startswith("budget of 6e+18 FLOPs: its 3 sizes do not bracket")
    with pytest.raises(ConfigError, match="1 budgets have sizes on both sides"):
        isoflop(runs.take(np.isclose(runs.flops, runs.flops.min(), rtol=1e-3)))


def test_envelope_has_the_runs_that_no_cheaper_one_beats():
    runs = points([1, 2, 3, 4, 5, 6], [1] * 6, [9.0, 8.0, 8.5, 7.0, 7.0, 6.0])
    assert [best.params for best in envelope(runs)] == [2, 4, 6]
    fitted = fit_frontier(chinchilla(sizes=15), "envelope", "akima", SQUARES, draws=20, seed=0)
    assert fitted.optimal["N"] == pytest.approx(TRUTH, abs=0.05)
    low, high = fitted.intervals["N_exponent"]
    assert low < fitted.optimal["N"] < high


def test_weights_of_a_power_law_are_inverse_squares():
    x = np.array([1.0, 10, 100, 1000])
    y = 3 * x**0.5 * np.array([1, 1, 1, 5])
    law = power_law([x], y, np.array([0.1, 0.1, 0.1, np.inf]))
    assert law.exponents[0] == pytest.approx(0.5) and law(100.0) == pytest.approx(30)
    heavy = power_law([x], y, np.array([1e-6, 1.0, 1.0, 1e-6]))
    assert heavy.exponents[0] == pytest.approx(0.5 + np.log10(5) / 3, rel=1e-4)


def test_intervals_of_a_power_law_equal_linear_regression():
    from scipy.stats import linregress, t

    x = np.geomspace(1e18, 1e20, 5)
    y = 3 * x**0.5 * np.exp([0.1, -0.2, 0.05, 0.1, -0.05])
    line = linregress(np.log(x), np.log(y))
    coefficients, exponents = law_draws([x], y, 40_000, 0)
    for draws, estimate, error in (
        (exponents, line.slope, line.stderr),
        (np.log(coefficients), line.intercept, line.intercept_stderr),
    ):
        wide = t.ppf(0.975, 3) * error
        assert interval(draws) == pytest.approx([estimate - wide, estimate + wide], abs=0.05 * wide)
    assert law_draws([x[:2]], y[:2], 9, 0).shape == (0, 9), "no degree of freedom is left"
    assert np.isfinite(law_draws([x[:3]], y[:3] * [1, 1e9, 1], 2000, 0)).all()


def test_best_learning_rate_is_a_power_of_size_and_length():
    sizes, lengths = (a.ravel() for a in np.meshgrid([1e7, 1e8, 1e9], [1e9, 1e10, 1e11]))
    best = 1.8 * sizes**-0.7 * lengths**0.3
    steps = np.exp(np.array([-1.2, -0.4, 0.3, 0.9]))
    params, tokens, rate = (np.repeat(a, 4) for a in (sizes, lengths, best))
    rate = rate * np.tile(steps, 9)
    loss = 3 + 0.1 * np.log(rate / np.repeat(best, 4)) ** 2
    edge = np.arange(36) >= 34  # the last pair has two values of the rate left
    runs = points(params, tokens, loss).take(~edge)
    rate = rate[~edge]
    fitted = fit_best(runs, rate, "lr", draws=50, seed=0)
    assert fitted.parameters["N_exponent"] == pytest.approx(-0.7)
    assert fitted.parameters["D_exponent"] == pytest.approx(0.3)
    assert fitted.parameters["coefficient"] == pytest.approx(1.8)
    assert fitted.diagnostics["left_out"] == [
        "N = 1e+09, D = 1e+11: has 2 values of the setting, needs 3 or more"
    ]


def test_value_of_repeats_decays_by_the_law():
    """Points made by the law's own formula, written out as in the paper."""
    params, unique, epochs = (
        a.ravel() for a in np.meshgrid([1e8, 1e9, 4e9], [1e9, 1e10], [1.0, 3, 10, 40])
    )
    decay_d = 15.0
    decay_n = 5.0
    fit_n = np.minimum(best_params(CHINCHILLA, unique), params)
    worth_d = unique + unique * decay_d * (1 - np.exp(-(epochs - 1) / decay_d))
    worth_n = fit_n + fit_n * decay_n * (1 - np.exp(-(params / fit_n - 1) / decay_n))
    runs = points(
        params, epochs * unique, PARAMETRIC.loss(CHINCHILLA, worth_n, worth_d), unique=unique
    )
    fitted = fit_decays(runs, Estimator(), CHINCHILLA, draws=0)
    assert [fitted.parameters[name] for name in DECAYS] == pytest.approx([15, 5], rel=1e-6)
    # N best for U tokens seen once: D = U is the best number of tokens of its budget.
    size = best_params(CHINCHILLA, unique)
    assert PARAMETRIC.best(CHINCHILLA, 6 * size * unique)[0] == pytest.approx(size)
    model = DecayModel(runs, CHINCHILLA)
    theta = np.log([12.0, 3.0])
    _, slope = model(theta)
    for i, step in enumerate(1e-5 * np.eye(2)):
        up = model(theta + step)[0]
        down = model(theta - step)[0]
        assert (up - down) / 2e-5 == pytest.approx(slope[:, i], rel=1e-5, abs=1e-9)
    with pytest.raises(ConfigError, match="cannot fit the base of the law"):
        fit_decays(runs, Estimator(), draws=0)
