"""The posterior of a budget's best loss, on known laws, by brute force, and on published runs."""

import json

import numpy as np
import pytest

from parallel3d.extras.scaling.estimator import PARAMETRIC, Estimator
from parallel3d.extras.scaling.fit import fit_law
from parallel3d.extras.scaling.forecast import ONE_RUN, forecast
from parallel3d.extras.scaling.frontier import losses_of
from parallel3d.extras.scaling.points import interval, points_of
from parallel3d.extras.scaling.posterior import BestLoss, back_test, posterior
from parallel3d.extras.scaling.runs import read
from tests.scaling.cases import CHINCHILLA, chinchilla, ladder, points, published

pytestmark = pytest.mark.pure

KEYS = ("dataset", "hparams", "warmup", "decay", "param_count", "val")
OTHER = {"E": 1.8, "A": 480.0, "B": 2100.0, "alpha": 0.35, "beta": 0.37}


def test_noiseless_law_is_recovered():
    flops = np.geomspace(1e18, 1e21, 6)
    law = posterior([BestLoss(c, 1.7 + 2000 * c**-0.17) for c in flops])
    estimates = {name: np.median(draws) for name, draws in law.parameters().items()}
    assert estimates == pytest.approx({"E": 1.7, "A": 2000, "gamma": 0.17}, rel=1e-3)
    assert np.median(law.loss(1e23)) == pytest.approx(1.7 + 2000 * 1e23**-0.17, rel=1e-6)
    assert posterior([BestLoss(c, 1.7 + 2000 * c**-0.17) for c in flops[:3]]) is None
    assert posterior([BestLoss(c, 1.7 + 0.01 * np.log(c)) for c in flops]) is None, "it rises"


def test_posterior_equals_a_sum_over_a_grid_of_laws():
    """Bayes' rule written out, over a grid of E, A and gamma."""
    flops = np.geomspace(1e18, 1e20, 6)
    random = np.random.default_rng(0)
    losses = (1.8 + 900 * flops**-0.15) * np.exp(0.002 * random.standard_normal(6))
    bests = [BestLoss(c, y, 0.4, 2e-4, 20.0) for c, y in zip(flops, losses, strict=True)]
    law = posterior(bests, draws=100_000)
    gamma, last, first = np.meshgrid(
        np.linspace(0.01, 0.6, 100),
        losses[-1] * np.linspace(0.98, 1.02, 81),
        losses[0] * np.linspace(0.98, 1.02, 81),
        indexing="ij",
    )
    # The law through two losses; E and the term at the middle are linear in both.
    ratio = (flops[-1] / flops[0]) ** -gamma
    term = (first - last) / (1 - ratio)  # at the first budget
    offset = first - term
    area = (flops[-1] / flops[0]) ** (-gamma / 2) / (1 - ratio)  # d(E, middle term) / d(both)
    squares = sum(
        (y - offset - term * (c / flops[0]) ** -gamma) ** 2 / (0.4 * y**2)
        for c, y in zip(flops, losses, strict=True)
    )
    weight = area * (squares + 0.3 * 1e-5) ** (-(6 + 0.3) / 2)
    weight = np.where((offset > 0) & (term > 0), weight, 0.0)
    weight *= np.exp(-((np.log(gamma / 0.12) / 0.7) ** 2) / 2) / gamma
    for budget in (5e19, 1e22):  # not at a coordinate of the grid
        forecasts = offset + term * (budget / flops[0]) ** -gamma
        order = np.argsort(forecasts, axis=None)
        share = np.cumsum(weight.ravel()[order]) / weight.sum()
        exact = forecasts.ravel()[order][np.searchsorted(share, [0.025, 0.5, 0.975])]
        drawn = np.percentile(law.loss(budget), [2.5, 50, 97.5])
        assert drawn == pytest.approx(exact, abs=0.03 * (exact[2] - exact[0]))
    assert exact[2] / exact[0] > 1.03


def test_curve_of_a_budget_has_its_minimum_at_the_best_size():
    """A distant size whose loss no cubic follows bends the curve far less than its equals."""
    random = np.random.default_rng(0)
    params = 1e8 * np.array([1 / 40, 1 / 20, 1 / 3, 1 / 2, 1 / 1.4, 1, 1.5, 2.2, 3, 25])
    loss = 3 * np.exp(0.02 * np.log(params / 1.2e8) ** 2)
    loss[0] *= 1.3
    one = points(params, 1e20 / 6 / params, loss)
    (best,), at_edge = losses_of(one, "isoflop")
    x = np.log(params / 1.2e8)
    bent = np.exp(np.polyval(np.polyfit(x, np.log(loss), 3), np.linspace(-1.5, 1.5, 301)).min())
    assert abs(best.loss / 3 - 1) < 0.002 < 0.01 < abs(bent / 3 - 1) and at_edge == []
    assert best.distant == 3 and 0.1 < best.variance < 1
    assert losses_of(one.take(params >= 1.4e8), "isoflop") == ([], [pytest.approx(1e20)])
    many = []
    for _ in range(300):
        noisy = points(params, 1e20 / 6 / params, loss * np.exp(0.003 * random.normal(size=10)))
        many.append(losses_of(noisy, "isoflop")[0][0].loss)
    assert np.std(np.log(many)) == pytest.approx(0.003 * np.sqrt(best.variance), rel=0.15)


def test_run_off_the_frontier_has_the_ratio_of_the_surface():
    squares = Estimator("squares")
    fit = fit_law(ladder(CHINCHILLA, 1, 0.001), PARAMETRIC, squares, draws=20, brief=True)
    for params, tokens in ((3e9, 3e10), (3e8, 3e11)):
        run = forecast(fit, params=params, tokens=tokens)
        truth = float(PARAMETRIC.loss(CHINCHILLA, np.array([params]), np.array([tokens]))[0])
        assert run.by == "frontier x surface" and run.loss == pytest.approx(truth, rel=5e-3)
        (low, high) = run.intervals["loss"]
        (run_low, run_high) = run.intervals[ONE_RUN]
        assert run_low < low < truth < high < run_high
    best = forecast(fit, flops=6e20)
    again = forecast(fit, params=best.params, tokens=best.tokens)
    assert best.by == "frontier" and again.loss == pytest.approx(best.loss)
    three = fit_law(chinchilla(budgets=3), PARAMETRIC, squares, draws=0, brief=True)
    alone = forecast(three, flops=1e22)
    assert alone.by == "parametric" and alone.loss == pytest.approx(
        float(PARAMETRIC.loss(CHINCHILLA, *PARAMETRIC.best(CHINCHILLA, 1e22))), rel=1e-5
    )
    assert "the surface makes the forecast" in alone.warnings[0] and not alone.back_test


def test_forecast_uses_the_surface_if_losses_fall_ever_faster():
    """Budgets too small for a power law: all six bracket their best size, and no law has E > 0."""
    best = np.repeat([3.686, 3.497, 3.296, 3.076, 2.850, 2.648], 7)  # configs/ladders/cpu-forecast
    flops = np.repeat(2.57e10 * 2.08 ** np.arange(6), 7)
    away = np.tile(np.linspace(-1, 1, 7), 6)
    params = np.sqrt(flops / 120) * np.exp(away)
    bent = points(params, flops / 6 / params, best + 0.1 * away**2)
    assert len(losses_of(bent, PARAMETRIC.name)[0]) == 6
    fit = fit_law(bent, PARAMETRIC, Estimator("squares"), draws=0, brief=True)
    prediction = forecast(fit, flops=1e13)
    (warning,) = prediction.warnings
    assert prediction.by == "parametric" and "fall ever faster with FLOPs" in warning
    assert "fewer than 4 budgets" not in warning


def test_back_test_fits_only_earlier_budgets():
    bests, _ = losses_of(ladder(CHINCHILLA, 0), "isoflop")
    one, two = back_test(bests)  # the last three would leave three
    assert (one["fitted_on"], two["fitted_on"], two["points"]) == (5, 4, 2)
    assert two["beyond"] == pytest.approx(100 ** (2 / 5))
    law = posterior(sorted(bests)[:4])
    assert [row["predicted"] for row in two["rows"]] == pytest.approx(
        [np.median(law.loss(best.flops)) for best in sorted(bests)[4:]]
    )
    truths = [row["loss"] for row in two["rows"]]
    errors = [abs(row["predicted"] / row["loss"] - 1) for row in two["rows"]]
    assert two["mean_error"] == pytest.approx(np.mean(errors)) and two["mean_error"] < 0.02
    raised = [best._replace(loss=2 * best.loss) if best.loss in truths else best for best in bests]
    assert back_test(raised)[1]["held"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("law", [CHINCHILLA, OTHER])
def test_coverage_of_intervals_over_200_ladders_is_92_to_98_percent(law):
    """Of the best loss and of a run, at 10 times the largest budget."""
    params, tokens = PARAMETRIC.best(law, 1e21)
    truth = float(PARAMETRIC.loss(law, params, tokens))
    held = []
    for seed in range(200):
        fitted = posterior(losses_of(ladder(law, seed), "isoflop")[0])
        losses = fitted.loss(1e21)
        run = truth * np.exp(0.003 * np.random.default_rng(seed + 999).standard_normal())
        bounds = (interval(losses), truth), (interval(fitted.run(losses)), run)
        held.append([low <= value <= high for (low, high), value in bounds])
    for share in np.mean(held, axis=0):
        assert 0.92 <= share <= 0.98, held


def test_best_runs_of_porian_at_10_times_the_fitted_budget():
    """arXiv:2406.19146, 15 ladders: each start of six or more budgets forecasts the later ones."""
    fits = json.loads(published("porian/published_fits.json").read_text())
    table = read(published("porian/isoflop_points.csv"))
    errors = []
    held = []
    for fit in (fit for fit in fits if fit["fit"] == "weighted"):
        runs = points_of(table.where([f"{key}={fit[key]}" for key in KEYS]), {"params": "n"})
        bests, _ = losses_of(runs, "isoflop")
        for count in range(6, len(bests)):
            law = posterior(bests[:count])
            for best in bests[count:]:
                if 5 < best.flops / bests[count - 1].flops < 17:
                    losses = law.loss(best.flops)
                    low, high = interval(law.run(losses, best.variance))
                    errors.append(abs(np.median(losses) / best.loss - 1))
                    held.append(low <= best.loss <= high)
    assert len(errors) == 87
    assert np.mean(errors) <= 0.026 and 0.85 <= np.mean(held) <= 0.98, (errors, held)
