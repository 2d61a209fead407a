"""Restarts: a run that dies at one step is given up."""

import json
import os

import pytest

from parallel3d.base.errors import TrainingError
from parallel3d.train.claim import Attempts, unfinished
from parallel3d.train.metrics import step_reached

pytestmark = pytest.mark.gloo

SETTINGS = {"lr": 1e-3}


def start(folder, step, settings=SETTINGS):
    """An attempt by a new process, which finds that the one before came to `step`."""
    attempt = Attempts(folder, settings)
    attempt.begin(step)
    return attempt


def write_metrics(folder, text):
    (folder / "metrics.jsonl").write_text(text)


@pytest.mark.parametrize("step", [0, 7])  # 0: each dies before its first step
def test_three_deaths_at_a_step_are_enough(tmp_path, step):
    start(tmp_path, 0)
    start(tmp_path, step)
    start(tmp_path, step)
    for _ in range(2):  # and it stays so
        with pytest.raises(TrainingError, match=rf"3 attempts .* in step {step + 1}.*json"):
            start(tmp_path, step)
    (tmp_path / "attempts.json").unlink()
    start(tmp_path, step)


def test_other_settings_are_another_chance(tmp_path):
    for _ in range(3):
        start(tmp_path, 7)
    start(tmp_path, 7, {"lr": 1e-4})  # the third death is not held against it
    start(tmp_path, 7, {"lr": 1e-4})
    start(tmp_path, 7, {"lr": 1e-4})
    with pytest.raises(TrainingError):
        start(tmp_path, 7, {"lr": 1e-4})
    start(tmp_path, 7, {"lr": 1e-5})  # not even what was refused
    start(tmp_path, 7, {"lr": 1e-5})


def test_progress_keeps_attempts_going(tmp_path):
    for step in (0, 7, 7, 8, 8, 7, 7, 8):
        start(tmp_path, step)  # would raise where it gives up
    record = json.loads((tmp_path / "attempts.json").read_text())
    assert record["running"] and record["deaths"] == [7, 7, 8]


@pytest.mark.parametrize("stopped", [False, True])
def test_clean_end_forgets_deaths(tmp_path, stopped):
    for _ in range(2):
        start(tmp_path, 7)
    start(tmp_path, 7).end(stopped)
    for _ in range(3):  # the first has no death before it
        start(tmp_path, 7)
    with pytest.raises(TrainingError):
        start(tmp_path, 7)


DAMAGED = [
    b"",
    b"{",
    b"[]",
    b"3",
    b"null",
    b"\xff\xfe",
    b'{"deaths": [1, 1, 1], "unknown": 1}',
    b'{"running": true, "deaths": ["7", "7"]}',
    b'{"running": true, "deaths": 7}',
    b'{"running": 1}',
    b'{"launch": 5}',
    b'{"settings": 5}',
    b'{"stopped": "yes"}',
]


@pytest.mark.parametrize("contents", DAMAGED)
def test_damaged_file_counts_as_missing(tmp_path, contents):
    path = tmp_path / "attempts.json"
    path.write_bytes(contents)
    assert unfinished(tmp_path.parent, "same") is None
    start(tmp_path, 7)
    assert json.loads(path.read_text())["deaths"] == []


def test_kill_during_write_leaves_old_file(tmp_path, monkeypatch):
    start(tmp_path, 0)
    before = (tmp_path / "attempts.json").read_bytes()

    def die(descriptor):
        raise InterruptedError

    monkeypatch.setattr(os, "fsync", die)
    with pytest.raises(InterruptedError):
        start(tmp_path, 7)
    assert (tmp_path / "attempts.json").read_bytes() == before


def test_step_reached_is_in_last_whole_line(tmp_path):
    assert step_reached(tmp_path) == 0
    for text, step in (
        ("", 0),
        ('{"step": 1', 0),
        ('{"step": 1}\n', 1),
        ('{"step": 1}\n{"step": 2}', 1),  # torn: its newline is missing
        ('{"step": 1}\n{"step": 2}\n{"st', 2),
        ('{"step": 1}\n{"st\n', 1),
        ('{"step": 1}\n\n[]\n{"loss": 2}\n', 1),
        ("".join(f'{{"step": {i}, "more": "{"x" * 100}"}}\n' for i in range(20000)), 19999),
    ):
        write_metrics(tmp_path, text)
        assert step_reached(tmp_path) == step
