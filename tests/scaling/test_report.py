"""The page of a fit: whole in one file, with its choices, forecasts and pictures."""

import re
from dataclasses import replace
from html import unescape

import numpy as np
import pytest

from parallel3d.extras.scaling import report_page
from parallel3d.extras.scaling.estimator import PARAMETRIC, Estimator
from parallel3d.extras.scaling.fit import fit_law
from parallel3d.extras.scaling.frontier import fit_frontier
from parallel3d.extras.scaling.points import Dropped
from parallel3d.extras.scaling.report_page import pictures
from tests.scaling.cases import chinchilla

pytestmark = pytest.mark.pure

FORECAST = {
    "registered_at": "2026-01-02T03:04:05+00:00",
    "flops": 1e22,
    "beyond": 10.0,
    "predicted": 2.25,
    "interval": [2.2, 2.3],
    "loss": 2.31,
    "error": -0.026,
    "held": False,
    "row": "big",
}


@pytest.fixture(scope="module")
def fit():
    runs = chinchilla(noise=0.01, budgets=4, sizes=5)
    seeds = runs.take(np.arange(20)).loss * 1.004
    runs = replace(
        runs,
        params=np.tile(runs.params, 2),
        tokens=np.tile(runs.tokens, 2),
        flops=np.tile(runs.flops, 2),
        loss=np.append(runs.loss, seeds),
        names=tuple(f"<{i}>" for i in range(40)),
        dropped=(Dropped("line 9", "loss = nan: the run diverged, or was not measured"),),
    )
    fitted = fit_law(runs, PARAMETRIC, Estimator("squares"), draws=30)
    diagnostics = {
        "n_counts": "params",
        "n_compared": {},
        "forecasts": [FORECAST],
        "table": "runs.csv",
    }
    return replace(fitted, diagnostics={**fitted.diagnostics, **diagnostics})


@pytest.mark.slow
def test_page_is_one_file_with_pictures_beside_it(fit, tmp_path):
    path = report_page.write(fit, tmp_path, title="Law of <mine>")
    page = path.read_text()
    pictures = {file.stem: file.read_bytes() for file in (tmp_path / "report").iterdir()}
    assert set(pictures) == {"loss", "isoflop", "residuals", "held_out"}
    assert all(image.startswith(b"\x89PNG") and len(image) > 5000 for image in pictures.values())
    assert_whole(page, fit, len(pictures))


def test_page_names_all_choices_of_the_fit(fit):
    page = report_page.page(fit, "Law of <mine>", {"loss": (b"a PNG", "what it shows")}, None)
    assert_whole(page, fit, 1)
    assert "what it shows" in page


def assert_whole(page, fit, count):
    sources = re.findall(r'src="([^"]*)"', page)
    assert len(sources) == count and all(s.startswith("data:image/png;base64,") for s in sources)
    assert "http" not in re.sub(r'src="[^"]*"', "", page), "nothing is fetched"
    text = unescape(re.sub(r"<(style|[^>]*)>", " ", page))
    assert "Law of <mine>" in text and "Law of &lt;mine&gt;" in page
    for words in (
        "fitted to 40 runs",
        "least squares of the loss",
        "2026-01-02 03:04",
        "2.2 to 2.3",
        "loss = nan: the run diverged",
        "30 resamples of the runs",
        "between 40 runs in 20 groups",
        "runs.csv, SHA-256",
        fit.points.digest,
        "learning-rate schedule and final rate",
        f"{fit.parameters['alpha']:.6g}",
    ):
        assert words in text, words
    row = re.search(r"<tr>(?:(?!</tr>).)*2026-01-02.*?</tr>", page).group()
    assert row.endswith("<td>NO</td></tr>")
    floor = fit.diagnostics["noise_floor"]["standard_deviation"]
    assert floor == pytest.approx(np.log(1.004) / np.sqrt(2), rel=1e-6)


def test_settings_of_runs_replace_unknown_ones_of_tables(fit):
    page = report_page.page(fit, "", {}, {"warm-up, steps": "10, 20"})
    assert "warm-up, steps" in page and "10, 20" in page
    assert "document separately" not in page


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["isoflop", "envelope"])
def test_every_law_has_pictures(kind):
    runs = chinchilla(noise=0.01)
    fitted = fit_frontier(runs, kind, "akima", Estimator(), draws=20, seed=0)
    assert {"loss", "optima"} <= set(pictures(fitted))
