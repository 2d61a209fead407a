"""A run says in time that its launcher may not wait until its state is saved."""

from types import SimpleNamespace

import pytest

from parallel3d.checkpoint import room
from parallel3d.train.trainer import Trainer

pytestmark = pytest.mark.gloo


@pytest.mark.parametrize(
    ("step", "save", "warned"), [(1, 18.5, False), (1, 19.5, True), (21, 0, True)]
)
def test_a_step_and_a_save_that_take_long_are_said(step, save, warned):
    said = []
    trainer = SimpleNamespace(
        saver=SimpleNamespace(expected_seconds=lambda: save),
        progress=SimpleNamespace(say=said.append),
    )
    Trainer._warn_if_slow(trainer, float(step))
    assert len(said) == warned
    if warned:
        assert f"a step took {step} s" in said[0] and "STOP" in said[0]


def test_a_trial_tells_how_long_a_save_takes(tmp_path, monkeypatch):
    # A disk that takes half a second for each trial file.
    sync, clock = room.os.fsync, [0.0]
    monkeypatch.setattr(room.os, "fsync", lambda file: (sync(file), clock.append(0.5)))
    monkeypatch.setattr(room.time, "perf_counter", lambda: sum(clock))
    assert room.seconds_to_write(tmp_path, 2**20) == 0  # too little to be worth a trial
    assert room.seconds_to_write(tmp_path, 10 * room._PROBE) == 5
    assert list(tmp_path.iterdir()) == []
