"""launch/evaluate.py as users start it: alone, under a launcher, and with a wrong input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.launching import PYTHON, Place, deepspeed, environment, torchrun

pytestmark = [pytest.mark.drill, pytest.mark.slow]

EVALUATE = str(Path(__file__).parents[2] / "launch/evaluate.py")
DONE = 0
BAD_INPUT = 2


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with runs/a, of one process."""
    place = Place(tmp_path_factory.mktemp("evaluate"))
    done = place.run(PYTHON, "--run.name", "a")
    assert done.returncode == DONE, done.stderr
    return place


@pytest.mark.parametrize("launcher", [PYTHON, torchrun(2), deepspeed(2)], ids=lambda x: x[0][-9:])
def test_standard_output_has_only_the_numbers(place, launcher):
    done = subprocess.run(
        [*launcher, EVALUATE, "runs/a", "--json"],
        cwd=place.root,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == DONE, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    (report,) = map(json.loads, lines)
    logged = (place.root / "runs/a/metrics.jsonl").read_text().splitlines()[-1]
    loss = json.loads(logged)["held_out_loss"]
    alone = launcher == [sys.executable]
    assert report["sets"]["held_out"]["loss"] == (loss if alone else pytest.approx(loss, rel=1e-6))


def test_wrong_input_exits_with_2(place):
    done = subprocess.run(
        [*PYTHON, EVALUATE, "runs/none"],
        cwd=place.root,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == BAD_INPUT and done.stdout == ""
    assert done.stderr.strip().startswith("runs/none: no checkpoint there; name a folder step-N")
