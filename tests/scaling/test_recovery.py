"""Laws that are known come back from points of theirs."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.coverage import LAW, coverage
from parallel3d.extras.scaling.estimator import OVER_TRAINING, PARAMETRIC, Estimator, SumModel
from parallel3d.extras.scaling.fit import fit_law
from tests.scaling.cases import CHINCHILLA, chinchilla, points

pytestmark = pytest.mark.pure
# Of arXiv:2403.08540's RedPajama fit.
GADRE = {"E": 1.83665, "a": 212.236, "b": 366.687, "eta": 0.136425}
OTHER = CHINCHILLA | {"E": 0.4, "alpha": 0.6, "beta": 0.15}


@pytest.mark.parametrize(
    ("kind", "law"),
    [
        ("huber", CHINCHILLA),
        pytest.param("squares", CHINCHILLA, marks=pytest.mark.slow),
        pytest.param("huber", OTHER, marks=pytest.mark.slow),
        pytest.param("likelihood", CHINCHILLA, marks=pytest.mark.slow),
    ],
)
def test_noiseless_parametric_law_is_recovered_to_a_millionth(kind, law):
    fitted = fit_law(chinchilla(law=law), PARAMETRIC, Estimator(kind), draws=0)
    for name, value in law.items():
        assert fitted.parameters[name] == pytest.approx(value, rel=1e-6), name
    total = law["alpha"] + law["beta"]
    assert fitted.optimal["N"] == pytest.approx(law["beta"] / total, rel=1e-6)
    assert fitted.optimal["D"] == pytest.approx(law["alpha"] / total, rel=1e-6)
    assert fitted.diagnostics["bounds_hit"] == [] and fitted.diagnostics["converged"]
    assert fitted.diagnostics["held_out"]["worst_error"] < 1e-6


def test_noiseless_over_training_law_is_recovered_to_a_millionth():
    law = GADRE
    params, ratio = (x.ravel() for x in np.meshgrid(np.geomspace(1e7, 1e9, 5), [5, 20, 80, 320]))
    flops = 6 * ratio * params**2
    terms = law["a"] * ratio ** law["eta"] + law["b"] * ratio ** -law["eta"]
    runs = points(params, ratio * params, law["E"] + terms * flops ** -law["eta"])
    fitted = fit_law(runs, OVER_TRAINING, Estimator(), draws=0)
    for name, value in law.items():
        assert fitted.parameters[name] == pytest.approx(value, rel=1e-6), name


def test_weight_is_the_inverse_square_of_the_standard_error():
    runs = chinchilla(budgets=5, sizes=5)
    wrong = np.arange(25) % 4 == 0
    loss = runs.loss * np.where(wrong, 1.2, 1.0)
    runs = replace(runs, loss=loss, standard_error=np.where(wrong, 1.0, 1e-5) * loss)
    plain, weighted = (
        fit_law(runs, PARAMETRIC, Estimator("squares", weighted=w), draws=0, brief=True)
        for w in (False, True)
    )
    assert weighted.parameters["alpha"] == pytest.approx(0.34, rel=1e-3)
    assert abs(plain.parameters["alpha"] / 0.34 - 1) > 0.05
    assert "weighted by 1 / standard error^2" in weighted.estimator
    weights = Estimator(weighted=True).weights(runs)
    assert weights.mean() == pytest.approx(1)
    assert weights[~wrong] / weights[0] == pytest.approx(1e10)


@pytest.mark.parametrize(("law", "values"), [(PARAMETRIC, CHINCHILLA), (OVER_TRAINING, GADRE)])
def test_best_size_of_a_budget_minimises_the_law(law, values):
    params, tokens = law.best(values, 1e21)
    assert 6 * params * tokens == pytest.approx(1e21)
    sizes = params * np.geomspace(0.5, 2, 2001)
    losses = law.loss(values, sizes, 1e21 / 6 / sizes)
    assert sizes[np.argmin(losses)] == pytest.approx(params, rel=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_coverage_of_intervals_over_forty_draws_is_above_85_percent():
    """The intervals hold the truth as often as they say."""
    shares = coverage(40, 200, Estimator())
    assert set(shares) == {*LAW, "N ~ C^"}
    for name, share in shares.items():
        assert 0.85 <= share <= 1, (name, share)


def theta_of(model, values):
    """What the model makes these values of: the inverse of its `natural`."""
    exponents = np.array([values[name] for name in model.law.exponents])
    logs = np.log([values[name] for name in model.law.coefficients])
    return np.concatenate([logs + model.middle @ exponents, exponents * model.spread])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["huber", "likelihood"])
def test_optimum_agrees_with_another_method(kind):
    """No step of a simplex search from it leads down."""
    from scipy.optimize import minimize

    runs = chinchilla(noise=0.02, seed=3)
    estimator = Estimator(kind)
    fitted = fit_law(runs, PARAMETRIC, estimator, draws=0)
    model = SumModel(PARAMETRIC, runs, log=True)
    best, _ = estimator.search(model, theta_of(model, fitted.parameters)[None], np.ones(len(runs)))
    assert best.objective == pytest.approx(fitted.objective, rel=1e-9)
    x = best.theta
    if kind == "likelihood":  # the scale is least absolute deviations' times delta, nearly
        x = np.append(x, np.log(1e-3 * np.mean(np.abs(model.target - model(x)[0]))))

    def value(x):
        return estimator.objective(model, x, np.ones(len(runs)))[0]

    simplex = x + np.vstack([np.zeros(len(x)), 0.02 * np.eye(len(x))])
    options = {"initial_simplex": simplex, "maxfev": 2000, "xatol": 1e-9, "fatol": 1e-13}
    rival = minimize(value, x, method="Nelder-Mead", options=options)
    assert rival.fun >= fitted.objective - 1e-8 * abs(fitted.objective)


@pytest.mark.parametrize("kind", ["huber", "likelihood", "squares"])
def test_gradients_equal_finite_differences(kind):
    runs = chinchilla(noise=0.05)
    estimator = Estimator(kind)
    model = SumModel(PARAMETRIC, runs, log=kind != "squares")
    x = theta_of(model, CHINCHILLA)
    x = np.append(x, -5.0) if kind == "likelihood" else x
    weights = np.random.default_rng(0).uniform(0, 2, len(runs))
    steps = 1e-6 * np.eye(len(x))
    values = [[estimator.objective(model, x + s, weights)[0] for s in (d, -d)] for d in steps]
    gradient = estimator.objective(model, x, weights)[1]
    assert gradient == pytest.approx(np.diff(values)[:, 0] / -2e-6, rel=1e-5, abs=1e-6)


def test_likelihood_is_the_logarithm_of_a_density():
    """Its integral over the residual is 1, and its scale the one of most likelihood."""
    from scipy.integrate import quad

    runs = points([1.0] * 3, [1.0] * 3, [1.0, 1.5, 2.5])

    class Flat:
        target = np.log(runs.loss)
        lower = np.array([0.3])
        upper = np.array([0.3])

        def __call__(self, theta):
            return np.repeat(theta, len(runs)), np.ones((len(runs), 1))

    estimator = Estimator("likelihood", delta=0.5)
    best = estimator.minimise(Flat(), np.array([0.3]), np.ones(len(runs)))
    residual = Flat.target - 0.3

    def expected(scale):
        def density(x):
            size = abs(x) / scale
            return np.exp(-(size**2 / 2 if size <= 0.5 else 0.5 * (size - 0.25))) / scale

        area = 2 * quad(density, 0, 200 * scale, limit=200)[0]
        return -sum(np.log(density(r) / area) for r in residual)

    def value(scale):
        return estimator.objective(Flat(), np.array([0.3, np.log(scale)]), np.ones(len(runs)))[0]

    scales = np.geomspace(0.01, 10, 4001)
    assert best.objective == pytest.approx(min(map(value, scales)), abs=1e-5)
    for scale in (0.1, 0.5, 2.0):
        assert value(scale) == pytest.approx(expected(scale), rel=1e-6)
