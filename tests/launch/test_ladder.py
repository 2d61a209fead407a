"""launch/scale.py run: a ladder of real runs, killed and started again."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.launching import Place, environment, session
from tests.scaling.ladder.cases import write

pytestmark = [pytest.mark.drill, pytest.mark.slow]

SCALE = str(Path(__file__).parents[2] / "launch/scale.py")


def command(file, *more):
    return [sys.executable, SCALE, "run", "--ladder", str(file), "--json", *more]


def test_micro_ladder_survives_a_kill(tmp_path):
    """Two sizes x two budgets: kill -9 while two runs train, and a second start finishes all."""
    place = Place(tmp_path)
    data = {
        "source": "text",
        "paths": [f"{tmp_path}/texts/*.txt"],
        "vocab_size": 270,
        "sequence_length": 16,
        "cache": str(place.cache),
    }
    file = write(tmp_path, data=data, budgets={"tokens": [64 * 40, 64 * 80]})
    runs = tmp_path / "runs"
    first = subprocess.Popen(
        command(file, "--parallel", "2"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 200
        while not list(runs.glob("*/metrics.jsonl")):
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        first.send_signal(signal.SIGKILL)
    finally:
        first.kill()
        first.wait()
    # At once: what its runs are still writing is waited for.
    done = subprocess.run(
        command(file, "--parallel", "2"),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["runs"]
    assert [row["state"] for row in rows] == ["finished"] * 4, done.stderr
    assert all(row["loss"] > 0 and row["standard_error"] > 0 for row in rows)
    for row in rows:
        text = (runs / row["name"] / "metrics.jsonl").read_text()
        steps = [json.loads(line)["step"] for line in text.splitlines()]
        assert steps == list(range(1, row["steps"] + 1))  # each step once
        output = (runs / "logs" / f"{row['name']}.log").read_text()
        assert "two launches cannot write to one run" not in output
        # A run counts its corpus as the ladder did, by passes over it.
        own = json.loads((runs / row["name"] / "corpus.json").read_text())["training_tokens"]
        whole = json.loads((runs / "corpus.json").read_text())["training_tokens"]
        assert own == pytest.approx(whole, rel=1e-3)
    assert not session(first.pid)
    fit = subprocess.run(
        [sys.executable, SCALE, "fit", str(runs)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert fit.returncode == 2 and "4 points: fewer than the 5 parameters" in fit.stderr
