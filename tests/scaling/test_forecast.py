"""Forecasts of each law, from the fit.json that it leaves."""

import json

import numpy as np
import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.base.step_lines import finite
from parallel3d.extras.scaling.data_constrained import fit_decays
from parallel3d.extras.scaling.estimator import OVER_TRAINING, PARAMETRIC, Estimator
from parallel3d.extras.scaling.fit import fit_law
from parallel3d.extras.scaling.forecast import Forecast, compare, forecast, register
from parallel3d.extras.scaling.frontier import fit_best, fit_frontier
from parallel3d.extras.scaling.points import Fit
from tests.scaling.cases import CHINCHILLA, chinchilla, points

pytestmark = pytest.mark.pure

SQUARES = Estimator("squares")


@pytest.fixture
def stored(tmp_path):
    """Give a fit as it is read back from its file."""

    def store(fit):
        path = tmp_path / "fit.json"
        path.write_text(json.dumps(finite(fit.document())))
        return Fit.read(path)

    return store


def test_isoflop_forecasts_the_best_run(stored):
    runs = chinchilla(sizes=15, budgets=6)
    fit = stored(fit_frontier(runs, "isoflop", "akima", SQUARES, draws=5, seed=0))
    prediction = forecast(fit, flops=1e22)
    params, tokens = PARAMETRIC.best(CHINCHILLA, 1e22)
    assert prediction.params == pytest.approx(float(params), rel=0.05)
    assert prediction.tokens == pytest.approx(float(tokens), rel=0.05)
    truth = float(PARAMETRIC.loss(CHINCHILLA, params, tokens))
    assert prediction.loss == pytest.approx(truth, rel=1e-3)
    assert prediction.beyond == pytest.approx(10 / 3)


def test_over_training_law_forecasts_long_runs(stored):
    law = {"E": 1.8, "a": 212.0, "b": 366.0, "eta": 0.136}
    params, ratio = (x.ravel() for x in np.meshgrid(np.geomspace(1e7, 1e9, 4), [5, 20, 80]))
    runs = points(params, ratio * params, OVER_TRAINING.loss(law, params, ratio * params))
    fit = stored(fit_law(runs, OVER_TRAINING, SQUARES, draws=0, brief=True))
    prediction = forecast(fit, params=7e9, tokens=7e9 * 640)
    truth = OVER_TRAINING.loss(law, np.array([7e9]), np.array([7e9 * 640]))[0]
    assert (
        prediction.loss == pytest.approx(truth, rel=1e-6) and prediction.intervals["loss"] is None
    )


def test_repeated_tokens_count_less_in_a_forecast(stored):
    params, unique, epochs = (
        a.ravel() for a in np.meshgrid([1e8, 1e9, 4e9], [1e9, 1e10], [1.0, 3, 10, 40])
    )
    rough = points(params, epochs * unique, 3 + 0.01 * epochs, unique=unique)
    fit = stored(fit_decays(rough, Estimator(), CHINCHILLA, draws=5))
    once = forecast(fit, params=1e8, tokens=1e9, unique=1e9)
    assert once.loss == pytest.approx(
        float(PARAMETRIC.loss(CHINCHILLA, np.array([1e8]), np.array([1e9]))[0]), rel=1e-2
    )
    assert once.loss < forecast(fit, params=1e8, tokens=1e9, unique=1e7).loss
    with pytest.raises(ConfigError, match="--unique-tokens: is missing"):
        forecast(fit, params=1e8, tokens=1e9)
    with pytest.raises(ConfigError, match="cannot say which N and D"):
        forecast(fit, flops=1e20)


def test_law_of_settings_forecasts_no_loss(stored):
    sizes, rates = (a.ravel() for a in np.meshgrid([1e7, 1e8, 1e9], [1.0, 2.0, 4.0]))
    runs = points(sizes, 20 * sizes, 3 + np.log(rates / 2) ** 2)
    fit = stored(fit_best(runs, rates, "lr", draws=0, seed=0))
    with pytest.raises(ConfigError, match="the best-value law does not predict a loss"):
        forecast(fit, flops=1e20)


def test_invalid_forecast_is_neither_registered_nor_read(stored, tmp_path):
    fit = stored(fit_law(chinchilla(sizes=5), PARAMETRIC, SQUARES, draws=0, brief=True))
    none = Forecast(flops=1e20, params=1e9, tokens=1.6e10, loss=None, intervals={}, beyond=1.0)
    with pytest.raises(ConfigError, match="has no law of the loss"):
        register(tmp_path / "a.json", none, fit)
    assert not (tmp_path / "a.json").exists()
    for text in ("", "{}", '{"law": 1}', "[]"):
        (tmp_path / "b.json").write_text(text)
        with pytest.raises(ConfigError, match="is not a forecast; name"):
            compare([tmp_path / "b.json"], chinchilla())
