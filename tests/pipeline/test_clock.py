"""Times of actions: on a device with a clock of its own, and none unasked."""

import time

import pytest
import torch

from parallel3d.pipeline import clock
from parallel3d.schedule.schedule import Action, Op, Span
from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case, Trainer

pytestmark = pytest.mark.gloo

FORWARD = Action(Op.F, 0, 0)
BACKWARD = Action(Op.B, 0, 0)


def test_times_are_measured_on_the_device(monkeypatch):
    """Work is queued at once, and done 10 s later; the host asks when all of it is queued."""
    calls = []
    done = iter([10.0, 10.5, 10.5, 11.5, 12.0])

    class Event:
        def __init__(self, device, enable_timing):
            calls.append("event")
            assert enable_timing

        def record(self):
            self.at = next(done)

        def synchronize(self):
            calls.append(f"wait for {self.at}")

        def elapsed_time(self, other):
            return 1e3 * (other.at - self.at)

    monkeypatch.setattr(torch, "Event", Event)
    before = time.time()
    device = clock.DeviceClock(torch.device("cuda"))
    for action in (FORWARD, BACKWARD):
        with device.measuring(action):
            pass
    started, ended, spans = device.spans()
    assert calls == ["event"] * 5 + ["wait for 12.0"]
    assert before <= started <= time.time() and ended == pytest.approx(started + 2.0)
    assert spans == [Span(FORWARD, 0.0, 0.5), Span(BACKWARD, 0.5, 1.5)]


def timed_steps(rank):
    """The actions timed while somebody asks, and those timed once nobody does."""
    trainer = Trainer(Case(microbatches=1, batch=2, steps=1))
    executor = trainer.executor
    engine = trainer.engine
    (batch,) = trainer.batches()
    with clock.timing(executor), clock.timing(executor, engine):
        executor.run(batch)
        actions = [span.action for span in executor.spans]
        assert 0 < executor.ended - executor.started < 60
        assert abs(executor.ended - time.time()) < 60
        engine.step(1e-3)
        assert engine.step_seconds > 0
    assert not executor.timed and not engine.timed
    executor.run(batch)
    return actions, executor.spans


def test_actions_are_timed_only_on_request():
    assert run_locally(timed_steps, 1) == [
        ([FORWARD, BACKWARD, BACKWARD._replace(op=Op.REDUCE)], [])
    ]
