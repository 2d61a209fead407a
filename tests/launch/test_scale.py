"""launch/scale.py fit: what it prints and writes, in this process."""

import json

import numpy as np
import pytest

from tests.scaling.cases import CHINCHILLA, chinchilla, write_csv
from tests.scaling.test_runs import write_run

pytestmark = pytest.mark.pure

KEYS = [
    "law",
    "estimator",
    "parameters",
    "standard_errors",
    "intervals",
    "objective",
    "points",
    "dropped",
    "diagnostics",
    "optimal_exponents",
]
QUIET = ("--no-report", "--json")
ISOFLOP = ("fit", "runs.csv", "--law", "isoflop", "--bootstraps", "0", *QUIET)


@pytest.fixture
def table(tmp_path):
    """Points without noise, and rows that no fit may see."""
    runs = chinchilla()
    columns = {"size": runs.params, "compute": runs.flops, "final": runs.loss}
    columns = {name: [*values.tolist(), *values[:1].tolist()] for name, values in columns.items()}
    columns["size"] += [1e9, 1e9, 1e9, "big"]
    columns["compute"] += [1e21, 1e21, 1e21, 1e21]
    columns["final"] += ["nan", 12.5, "", 2.5]
    return write_csv(tmp_path / "runs.csv", **columns)


def test_table_with_flops_instead_of_tokens_is_fitted(scaled, table, tmp_path):
    code, out, err = scaled(
        "fit",
        table,
        "--n-column",
        "size",
        "--flops-column",
        "compute",
        "--loss-column",
        "final",
        "--drop-largest-losses",
        "2",
        "--bootstraps",
        "8",
        "--no-report",
        "--json",
    )
    assert code == 0, err
    report = json.loads(out)
    assert list(report) == KEYS
    for name, value in CHINCHILLA.items():
        assert report["parameters"][name] == pytest.approx(value, rel=1e-6)
        low, high = report["intervals"][name]
        assert low == pytest.approx(value, rel=1e-4) and high == pytest.approx(value, rel=1e-4)
    assert report["optimal_exponents"]["N"] == pytest.approx(0.28 / 0.62)
    assert report["points"] == 79
    reasons = {gone["row"]: gone["reason"] for gone in report["dropped"]}
    assert reasons.pop("line 83") == "is equal to line 2"
    assert reasons.pop("line 84") == "final = 'nan' is not a finite number above 0"
    assert "diverged: loss 12.5" in reasons.pop("line 85")
    assert "final = '' is not a finite" in reasons.pop("line 86")
    assert "size = 'big' is not a finite" in reasons.pop("line 87")
    assert len(reasons) == 2 and all("largest losses" in why for why in reasons.values())
    stored = json.loads((tmp_path / "fit.json").read_text())
    assert stored["parameters"] == report["parameters"]
    assert len(stored["samples"]["alpha"]) == 8
    assert "fitted to 79 runs" in err and "line 84 final = 'nan'" in " ".join(err.split())


def test_other_laws_are_printed_and_stored(scaled, tmp_path):
    runs = chinchilla(noise=0.01, budgets=4, sizes=6)
    rates = np.tile([1e-4, 3e-4, 9e-4], 24)
    params, tokens, loss = (np.repeat(a, 3) for a in (runs.params, runs.tokens, runs.loss))
    best = 3e-4 * (params / 1e9) ** -0.1
    write_csv(
        tmp_path / "runs.csv",
        params=params,
        tokens=tokens,
        unique=tokens / 4,
        lr=rates,
        loss=loss * np.exp(0.01 * np.log(rates / best) ** 2),
    )
    (tmp_path / "base.json").write_text(json.dumps(CHINCHILLA))
    for law, flags in {
        "isoflop": ("--method", "parabola"),
        "envelope": (),
        "data-constrained": ("--unique-column", "unique", "--base", "base.json"),
        "best-value": ("--setting-column", "lr"),
        "over-training": ("--estimator", "squares"),
    }.items():
        code, out, err = scaled("fit", "runs.csv", "--law", law, *flags, "--bootstraps", 3, *QUIET)
        assert code == 0, err
        report = json.loads(out)
        assert list(report) == KEYS and report["law"] == law
        assert set(report["intervals"]) == set(report["parameters"])
        assert err.startswith(f"{law} law") and "fitted to 72 runs" in err.replace("\n", " ")
    assert "best N by akima grows as C^" in scaled(*ISOFLOP)[2]
    assert report["optimal_exponents"] == {"N": 0.5, "D": 0.5}


def test_intervals_depend_only_on_the_seed(scaled, tmp_path):
    runs = chinchilla(noise=0.02, budgets=3, sizes=4)
    write_csv(tmp_path / "runs.csv", params=runs.params, tokens=runs.tokens, loss=runs.loss)
    flags = ("fit", "runs.csv", "--estimator", "squares", "--bootstraps", "3", *QUIET)
    first, again, other = (
        json.loads(scaled(*flags, "--seed", seed)[1])["intervals"] for seed in (1, 1, 2)
    )
    assert first == again != other


def test_folder_of_runs_is_fitted_with_every_count_of_parameters(scaled, tmp_path):
    for width in (16, 32, 48):
        for steps in (10, 20, 40):
            name = f"{width}-{steps}"
            run = write_run(tmp_path / "runs", name, steps=steps, reached=steps, width=width)
            loss = 2 + 40 / width**0.5 + 30 / (64 * steps) ** 0.3
            last = {"step": steps, "tokens": 64 * steps, "loss": loss, "held_out_loss": loss}
            (run / "metrics.jsonl").write_text(f"{json.dumps(last)}\n")
    write_run(tmp_path / "runs", "cut", reached=3)
    flags = ("--estimator", "squares", "--bootstraps", "0", *QUIET)
    code, out, err = scaled("fit", "runs", *flags)
    assert code == 0, err
    report = json.loads(out)
    assert report["points"] == 9 and report["parameters"]["beta"] == pytest.approx(0.3, rel=1e-6)
    assert report["diagnostics"]["n_counts"] == "with_head"
    compared = report["diagnostics"]["n_compared"]
    assert list(compared) == ["with_head", "transformer", "total"]
    # The blocks grow faster with the width than the head.
    assert compared["transformer"]["parameters"]["alpha"] < report["parameters"]["alpha"]
    assert report["dropped"] == [{"row": "cut", "reason": "not finished: step 3 of 10"}]


def test_json_lines_and_lists_are_accepted_as_tables(scaled, tmp_path):
    runs = chinchilla(budgets=4, sizes=4)
    rows = [
        {"n": n, "d": d, "loss": y, "set": "a"}
        for n, d, y in zip(runs.params, runs.tokens, runs.loss, strict=True)
    ]
    rows.append({"n": 1e8, "d": 1e9, "loss": 3.0, "set": "b"})
    (tmp_path / "runs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "runs.json").write_text(json.dumps(rows))
    flags = ("--where", "set=a", "--estimator", "squares", "--bootstraps", "0", *QUIET)
    for name in ("runs.jsonl", "runs.json"):
        code, out, err = scaled("fit", name, *flags)
        assert code == 0, err
        report = json.loads(out)
        assert report["points"] == 16
        assert report["parameters"]["alpha"] == pytest.approx(0.34, rel=1e-6)
        assert report["intervals"]["alpha"] is None
