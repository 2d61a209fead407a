"""benchmarks/long_run.py: the mesh stays on plain transformers' curve for as long as it is run."""

import json
import sys

import pytest

from benchmarks import long_run

pytestmark = pytest.mark.gloo


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("cpu_adam")
def test_eight_steps_match_transformers_in_both_precisions(tmp_path, monkeypatch, capsys):
    sizes = ["--steps", "8", "--micro", "1", "--length", "16", "--without", "again-bf16"]
    files = ["--keep", str(tmp_path), "--picture", str(tmp_path / "curves.png"), "--json"]
    monkeypatch.setattr(sys, "argv", ["long_run.py", *sizes, *files])
    assert long_run.main() == 0
    report = json.loads(capsys.readouterr().out)
    rows = {row["ours"]: row for row in report["rows"]}
    assert rows["mesh-fp32"]["loss_worst"] < 1e-6 and rows["mesh-fp32"]["norm_worst"] < 1e-4
    assert rows["again-fp32"]["loss_worst"] < 1e-6
    assert rows["mesh-bf16"]["loss_worst"] < 0.02
    assert (tmp_path / "curves.png").read_bytes()[1:4] == b"PNG"
