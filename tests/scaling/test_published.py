"""Published fits, from the published points that lie beside the repository (else skipped)."""

import json
from collections import defaultdict

import numpy as np
import pytest

from parallel3d.extras.scaling.data_constrained import DECAYS, DecayModel, fit_decays
from parallel3d.extras.scaling.estimator import OVER_TRAINING, Estimator
from parallel3d.extras.scaling.fit import fit_law
from parallel3d.extras.scaling.frontier import exponents, power_law, profiles
from parallel3d.extras.scaling.points import points_of
from parallel3d.extras.scaling.runs import Table, read
from tests.scaling.cases import published

pytestmark = pytest.mark.pure

SMALLEST = "d=96_l=8_h=4"
FOUR = (SMALLEST, "d=512_l=8_h=4", "d=576_l=24_h=8", "d=1024_l=24_h=8")
KEYS = ("dataset", "hparams", "warmup", "decay", "param_count", "val")


def expected(paper):
    return json.loads(published("expected_fits.json").read_text())[paper]


def rows_where(table, keep):
    indices = [i for i, row in enumerate(table.rows) if keep(row)]
    rows, names = (tuple(of[i] for i in indices) for of in (table.rows, table.names))
    return Table(table.path, table.columns, rows, names)


@pytest.mark.parametrize(
    "dataset",
    ["c4_original", *(pytest.param(x, marks=pytest.mark.slow) for x in ("rpj", "rw_original"))],
)
def test_gadre_is_reproduced_to_the_printed_digits(dataset):
    """arXiv:2403.08540: five runs, least squares of the loss."""
    table = read(published("gadre/gadre_104_models.csv")).where([f"dataset={dataset}"])

    def fitted(row):
        length = float(row["chinchilla_multiplier"])
        if length == 1:
            return row["model"] in FOUR
        return length == 16 and row["model"] == SMALLEST

    named = {"params": "params", "tokens": "tokens", "loss": "loss_c4_val"}
    points = points_of(rows_where(table, fitted), named)
    assert len(points) == 5
    fit = fit_law(points, OVER_TRAINING, Estimator("squares"), draws=0)
    target = expected("gadre")["targets"][dataset]
    for name, value in fit.parameters.items():
        assert float(f"{value:.6g}") == target[name], name
    for model, length, key in (
        ("open_lm_1b", 32, "rel_err_1B_M640_pct"),
        ("open_lm_7b", 1, "rel_err_7B_M20_pct"),
    ):
        if key in target:
            rows = table.where([f"model={model}", f"chinchilla_multiplier={length}"])
            run = points_of(rows, named)
            predicted = OVER_TRAINING.loss(fit.parameters, run.params, run.tokens)
            error = 100 * abs(predicted / run.loss - 1)
            assert round(float(error[0]), 4) == target[key]


def configurations(rows):
    rows_by_key = defaultdict(list)
    for row in rows:
        rows_by_key[tuple(row[key] for key in KEYS)].append(row)
    return rows_by_key


def test_porian_exponents_are_reproduced_to_four_digits():
    """arXiv:2406.19146: best sizes, weighted by 1 / n_log_std^2."""
    fits = json.loads(published("porian/published_fits.json").read_text())
    pairs = configurations(read(published("porian/optimal_pairs.csv")).rows)
    weighted = [fit for fit in fits if fit["fit"] == "weighted"]
    assert len(weighted) == 15
    for fit in weighted:
        rows = pairs[tuple(fit[key] for key in KEYS)]
        flops, best, error = (
            np.array([float(row[name]) for row in rows]) for name in ("flops", "n_opt", "n_log_std")
        )
        law = power_law([flops], best, error)
        assert round(law.exponents[0], 4) == round(fit["n_exponent"], 4), fit


@pytest.mark.slow
def test_porian_exponents_are_reproduced_from_the_raw_points():
    """Akima's interpolation of each budget's points, and plain least squares: within 0.01."""
    fits = json.loads(published("porian/published_fits.json").read_text())
    table = read(published("porian/isoflop_points.csv"))
    for fit in (fit for fit in fits if fit["fit"] == "weighted"):
        rows = table.where([f"{key}={fit[key]}" for key in KEYS])
        points = points_of(rows, {"params": "n"})
        minima = [profile.least("akima") for profile in profiles(points)]
        bests = [best for best in minima if best]
        assert exponents(bests)["N_exponent"] == pytest.approx(fit["n_exponent"], abs=0.01)


@pytest.fixture
def repeated():
    """The points of arXiv:2305.16264, and the base of their law."""
    named = {"loss": "val_loss", "unique": "unique_tokens"}
    points = points_of(read(published("datablations/data_constrained_points.csv")), named)
    law = expected("datablations")["law_params"]
    base = {name.upper(): float(np.exp(law[name])) for name in ("e", "a", "b")}
    return points, base | {"alpha": law["alpha"], "beta": law["beta"]}


def test_datablations_law_at_the_published_parameters(repeated):
    points, base = repeated
    target = expected("datablations")
    assert len(points) == target["rows"]
    model = DecayModel(points, base)
    theta = np.log([target["law_params"][name] for name in DECAYS])
    value, _ = Estimator().objective(model, theta, np.ones(len(points)))
    assert value == pytest.approx(target["objective_at_published"], rel=1e-6)
    fitted = np.exp(model(theta)[0])
    rest = points.loss - fitted
    spread = points.loss - points.loss.mean()
    assert 1 - (rest @ rest) / (spread @ spread) == pytest.approx(target["R2"], abs=1e-6)


@pytest.mark.slow
def test_datablations_fit_is_better_than_the_published_one(repeated):
    points, base = repeated
    fitted = fit_decays(points, Estimator(), base, draws=0)
    target = expected("datablations")["global_min_of_same_objective"]
    assert fitted.objective <= 0.0158047
    assert fitted.objective == pytest.approx(target["objective"], rel=1e-8)
    for name in DECAYS:
        assert fitted.parameters[name] == pytest.approx(target[name], rel=1e-3)
