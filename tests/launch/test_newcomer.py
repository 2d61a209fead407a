"""A newcomer's first hour: clone, a run by the clock, its page, own text, a resumed run."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.launching import environment

pytestmark = [pytest.mark.drill, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
MINUTES = 2
STOPPED = 3


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("newcomer") / "parallel3d"
    subprocess.run(["git", "clone", "-q", ROOT, folder], check=True)
    return folder


def parallel3d(clone, *words, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "parallel3d", *words],
        cwd=clone,
        capture_output=True,
        text=True,
        env=environment() | {"PYTHONPATH": str(clone), "COLUMNS": "80"},
        timeout=900,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def steps_of(run):
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_from_a_clone_to_a_resumed_run(clone):
    printed = parallel3d(clone, "quick", "--minutes", str(MINUTES))
    (run,) = (path.parent for path in (clone / "runs").glob("*/metrics.jsonl"))
    assert f"{len(steps_of(run))}" in printed and "held-out loss" in printed
    assert (run / "config.json").is_file() and (run / "weights" / "config.json").is_file()
    sample = parallel3d(clone, "generate", str(run), "--prompt", "def ", "--max-new-tokens", "20")
    assert "def " in sample

    parallel3d(clone, "report", str(run))
    (page,) = run.glob("**/*.html")
    html = page.read_text()
    assert not re.findall(r"""(?:src|href)=["']?https?:""", html) and "data:image" in html

    texts = clone / "own"
    texts.mkdir()
    for number, path in enumerate(sorted((clone / "docs").glob("*.md"))):
        (texts / f"{number}.txt").write_text(path.read_text())
    config = next((clone / "runs").glob("*.json"))
    own = [
        "train",
        "--config",
        str(config),
        "--mesh.dp",
        "1",
        "--train_batch_size",
        "auto",
        "--data.source",
        "text",
        "--data.paths",
        json.dumps([f"{texts}/*.txt"]),
        "--run.name",
        "own",
        "--train.steps",
        "8",
        "--train.lr_schedule.warmup_steps",
        "1",
    ]
    parallel3d(clone, *own, "--train.stop_after", "5", code=STOPPED)
    assert steps_of(clone / "runs/own") == [*range(1, 6)]
    parallel3d(clone, *own)
    assert steps_of(clone / "runs/own") == [*range(1, 9)]
