"""benchmarks/scaling.py measures, plans and draws."""

import json
from pathlib import Path

import pytest

from benchmarks import scaling

pytestmark = pytest.mark.gloo

SIZES = {
    "rounds": 1,
    "steps": 1,
    "hidden": 128,
    "layers": 2,
    "micro": 1,
    "microbatches": 2,
    "length": 16,
}
ARGUMENTS = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]


@pytest.mark.slow
def test_small_benchmark_measures_plans_and_draws(tmp_path, capsys):
    file = tmp_path / "scaling.png"
    hardware = Path(__file__).parents[2] / "configs" / "hardware" / "A100-SXM4-80GB.json"
    model = ["--vocab", "512", "--precision", "bf16", "--ranks", "1", "2"]
    output = ["--hardware", str(hardware), "--picture", str(file), "--json"]
    assert scaling.main([*ARGUMENTS, *model, *output]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(r["axis"], r["ranks"]) for r in rows] == [(a, n) for a in scaling.AXES for n in (1, 2)]
    for one, two in zip(rows[::2], rows[1::2], strict=True):
        assert one["measured"] == one["planned"] == one["ideal"] == 1
        assert two["measured"] == pytest.approx(one["seconds"] / two["seconds"])
        assert two["ideal"] == 2 and two["planned"] < 2
    assert file.read_bytes()[1:4] == b"PNG"
