"""Warnings of what makes forecasts fail: a sound ladder has none, each fault has its own."""

import numpy as np
import pytest

from parallel3d.extras.scaling.frontier import with_checks
from parallel3d.extras.scaling.points import Fit, points_of
from parallel3d.extras.scaling.runs import Table
from tests.scaling.cases import ladder

pytestmark = pytest.mark.pure


def columns(keep=slice(None), *, every=1, **factors):
    """The columns of a ladder of six budgets; `factors` multiply every so-many-th of the rows."""
    runs = ladder()
    table = {name: getattr(runs, name).copy() for name in ("params", "tokens", "flops", "loss")}
    for name, factor in factors.items():
        table[name][::every] *= factor
    return {name: values[keep] for name, values in table.items()}


def warnings(table, law="parametric"):
    rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    names = tuple(f"line {i}" for i in range(2, 2 + len(rows)))
    read = Table("runs.csv", tuple(table), tuple(rows), names)
    fit = Fit(law, "", {}, 0.0, points_of(read, {}), {}, diagnostics={"warnings": ["its own"]})
    checked = with_checks(fit, read).diagnostics
    assert checked["warnings"] == ["its own", *checked["forecast_warnings"]]
    return checked["forecast_warnings"]


RATE = {"lr": np.full(42, 3e-4)}
SIZE = np.arange(42) % 7
FAULTS = [
    (columns(np.arange(42) >= 7), ["only 5 budgets have their best size between others"]),
    (columns(np.arange(42) < 28), ["only 4 budgets", "span a factor of 15.8 in FLOPs"]),
    (
        columns((SIZE > 3) | (np.arange(42) > 6)),
        ["only 5 budgets", "best size of 1e+18 FLOPs is the smallest or the largest"],
    ),
    (columns() | RATE, ["all 42 sizes have the same learning rate"]),
    (columns() | RATE | {"parametrization": ["mup"] * 42}, []),
    (columns() | {"lr": 3e-4 * np.geomspace(1, 2, 42)}, []),
    ({**columns(), "loss": np.exp(columns()["loss"])}, ["these look like perplexities"]),
    (columns(flops=1e-18), ["these look like units of 1e18"]),
    (columns(flops=1e-9), ["FLOPs / 6ND: 1e-09 in the median run"]),
    (columns(params=1e-6, flops=1e-6), ["tokens per parameter: "]),
    (columns(every=3, flops=1e-18), ["FLOPs / 6ND: 1e-18 in line", "a column mixes units"]),
    (
        {k: v for k, v in columns(every=3, params=1e-6).items() if k != "flops"},
        ["tokens per parameter: ", "a column mixes units"],
    ),
]


def test_sound_ladder_has_no_warnings():
    assert warnings(columns()) == []
    assert warnings(columns(np.arange(42) >= 7), "over-training") == []


@pytest.mark.parametrize(("table", "words"), FAULTS)
def test_each_fault_gives_its_warning(table, words):
    lines = warnings(table)
    text = "\n".join(lines)
    assert all(word in text for word in words) and bool(lines) == bool(words), lines
    assert len(lines) <= max(1, len(words))
