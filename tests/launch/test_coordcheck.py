"""launch/scale.py coordcheck: what it prints, draws and ends with; what it refuses."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.drill

COMMAND = [sys.executable, "launch/scale.py", "coordcheck"]


def ended(*arguments):
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True)


@pytest.mark.slow
def test_exit_code_is_1_if_a_layer_is_not_flat(tmp_path):
    flags = ["--widths", "32", "64", "--seeds", "1", "--steps", "2", "--json"]
    picture = tmp_path / "a.png"
    done = ended("--config", "ds.json", *flags, "--plot", str(picture))
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"] is False and report["widths"] == [32, 64]
    assert {"name", "slope", "flat"} <= report["layers"][0].keys()
    assert "standard: NOT FLAT over the widths 32, 64" in done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--widths", "64"], "scale: --widths 64: only one width; a slope needs at least two"),
        (["--parallel3d.model.parametrization.type", "mup"], "base_width = null: is missing"),
    ],
)
def test_uninformative_check_is_refused(arguments, message, scaled):
    code, _, err = scaled("coordcheck", "--config", "ds.json", *arguments)
    assert code == 2 and message in err, err
