"""launch/scale.py predict: forecasts, their registration, and the truth beside them."""

import json
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from parallel3d.extras.scaling.estimator import PARAMETRIC
from tests.scaling.cases import CHINCHILLA, chinchilla, write_csv

pytestmark = pytest.mark.pure

FIT = ("fit", "runs.csv", "--estimator", "squares", "--bootstraps", "8", "--no-report", "--json")
RUN = ("predict", "--fit", "fit.json", "--params", "1e10", "--tokens", "3e11")


@pytest.fixture
def fitted(scaled, tmp_path):
    """A fit in the folder, of the runs that it gives."""
    runs = chinchilla(noise=0.01, budgets=5, sizes=6)
    write_csv(tmp_path / "runs.csv", params=runs.params, tokens=runs.tokens, loss=runs.loss)
    code, out, err = scaled(*FIT)
    assert code == 0, err
    return runs, json.loads(out)


def test_best_run_of_a_budget_is_forecast_and_registered(scaled, fitted, tmp_path):
    code, out, err = scaled("predict", "--fit", "fit.json", "--flops", "1e23", "--json")
    assert code == 0
    made = json.loads(out)
    keys = ["flops", "params", "tokens", "loss", "intervals", "by", "back_test", "warnings"]
    assert list(made) == keys and made["by"] == "frontier"
    params, tokens = PARAMETRIC.best(CHINCHILLA, 1e23)
    assert made["flops"] == 1e23 == pytest.approx(6 * made["params"] * made["tokens"])
    spread = made["intervals"]
    loss = PARAMETRIC.loss(CHINCHILLA, params, tokens)
    truth = {"params": params, "tokens": tokens, "loss": loss}
    for name, value in truth.items():
        assert spread[name][0] < made[name] < spread[name][1]
        assert spread[name][0] < float(value) < spread[name][1]
    low, high = spread["loss_of_a_run"]
    assert low < spread["loss"][0] and spread["loss"][1] < high
    assert "33.3 times the FLOPs of the largest fitted run" in err
    assert "last 1 from 4 before" in err[err.index("Back-test of the forecasts") :]
    assert made["back_test"][0]["fitted_on"] == 4
    (warning,) = made["warnings"]
    assert warning.startswith("only 5 budgets have their best size") and "WARNING: only 5" in err
    assert warning in fitted[1]["diagnostics"]["warnings"], "the fit printed it too"
    # A registered one is named after its budget and the time.
    assert scaled("predict", "--fit", "fit.json", "--flops", "1e24", "--register")[0] == 0
    (file,) = tmp_path.glob("forecast-1e+24-*.json")
    assert json.loads(file.read_text())["flops"] == 1e24
    assert file.stat().st_mode & 0o222 == 0


def test_forecast_is_registered_once_and_compared_with_its_run(scaled, fitted, tmp_path):
    runs, report = fitted
    assert scaled(*RUN, "--register", "sworn.json")[0] == 0
    sworn = (tmp_path / "sworn.json").read_bytes()
    made = json.loads(sworn)
    assert made["data_sha256"] == report["diagnostics"]["data"]["sha256"]
    assert made["law"] == "parametric" and made["parameters"] == report["parameters"]
    when = datetime.fromisoformat(made["registered_at"])
    assert timedelta(0) <= datetime.now(UTC) - when < timedelta(minutes=5)
    code, out, err = scaled(*RUN, "--register", "sworn.json")
    assert (code, out) == (2, "") and "a registered forecast is never overwritten" in err
    assert (tmp_path / "sworn.json").read_bytes() == sworn

    code, out, err = scaled(*FIT, "--forecasts", "sworn.json")
    (none,) = json.loads(out)["diagnostics"]["forecasts"]
    assert none["held"] is None and "no run yet" in err
    low, high = made["intervals"]["loss_of_a_run"]
    for truth, held in ((0.999 * high, True), (0.999 * low, False)):
        later = {"params": 1.001e10, "tokens": 3e11, "loss": truth}
        columns = {k: np.append(getattr(runs, k), v) for k, v in later.items()}
        write_csv(tmp_path / "runs.csv", **columns)
        code, out, err = scaled(*FIT, "--forecasts", "sworn.json")
        (line,) = json.loads(out)["diagnostics"]["forecasts"]
        assert (line["held"], line["row"], line["loss"]) == (held, "line 32", truth)
        assert line["error"] == pytest.approx(made["loss"] / truth - 1)
        fit = json.loads(out)  # to the other runs alone
        assert fit["points"] == len(runs) and fit["parameters"] == report["parameters"]
        assert fit["dropped"][-1] == {
            "row": "line 32",
            "reason": "held out: sworn.json is its forecast",
        }
        table = err[err.index("Registered forecasts") : err.index("Back-test")]
        assert table.split()[-1] == ("yes" if held else "NO")
    code, out, err = scaled(*RUN, "--register", "late.json")
    assert (code, out) == (2, "") and "is among the points of fit.json" in err


BAD = [
    ((), "--flops, --params, --tokens: give --flops alone"),
    (("--params", "1e9"), "or --params and --tokens for one run"),
    (("--params", "1e9", "--flops", "1e22"), "give --flops alone"),
    (("--flops", "-3"), "--flops = -3: must be a number above 0"),
    (("--flops", "many"), "--flops = many: must be a number above 0"),
    (("--flops", "nan"), "--flops = nan: must be a number above 0"),
    (("--flops", "1e22", "--fit", "nowhere.json"), "nowhere.json: does not exist"),
    (("--flops", "1e22", "--fit", "runs.csv"), "runs.csv: is not a fit; name a fit.json"),
]


@pytest.mark.parametrize(("flags", "words"), BAD)
def test_incomplete_forecast_is_refused(scaled, tmp_path, flags, words):
    (tmp_path / "runs.csv").write_text("{}")
    (tmp_path / "fit.json").write_text(
        '{"law": "parametric", "estimator": "", "parameters": {}, "samples": {}, "scatter": [], '
        '"objective": 0, "optimal_exponents": {}, "diagnostics": {}, "data": {"names": ["a"], '
        '"params": [1], "tokens": [1], "flops": [1], "loss": [1]}}'
    )
    code, out, err = scaled("predict", "--fit", "fit.json", *flags)
    assert (code, out) == (2, "") and words in err and err.count("\n") == 1
