"""wall_clock_breakdown on real ranks: figures recomputed."""

import re
from types import SimpleNamespace

import pytest

from parallel3d.config import RunConfig
from parallel3d.data.prepare import prepare
from parallel3d.schedule.action import Action, Span
from parallel3d.train.profiler import StepWatch
from tests.config.styles import corpus_in, filled
from tests.train.running import start

pytestmark = pytest.mark.gloo

STEPS, EVERY, MICROBATCHES = 4, 2, 3


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What rank 0 said of a run on two stages with everything on."""
    root = tmp_path_factory.mktemp("watch")
    raw = filled({}, corpus_in(root), steps=STEPS, pp=2)
    raw |= {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICROBATCHES,
        "steps_per_print": EVERY,
        "wall_clock_breakdown": True,
        "flops_profiler": {"enabled": True},  # taken, without effect
        "comms_logger": {"enabled": True},
        "zero_optimization": {"stage": 0},
    }
    raw.pop("train_batch_size", None)
    ranks = start(raw, (2, 1, 1))
    assert [(ended.code, ended.error) for ended in ranks] == [(0, "")] * 2
    assert not any(line.startswith("time") for line in ranks[1].said)
    corpus = prepare(RunConfig.from_dict(raw).data)
    return RunConfig.from_dict(raw).resolve(2).with_vocab_size(corpus.vocab_size), ranks[0].said


def test_the_parts_of_a_step_add_up_to_it(said):
    _, lines = said
    times = [line for line in lines if line.startswith("time ")]
    steps = [re.match(r"time +step (\d+), pp (\d), mean of (\d+): ", line) for line in times]
    expected = [(s, p, EVERY) for s in (2, 4) for p in (0, 1)]
    assert [tuple(map(int, found.groups())) for found in steps] == expected
    for line in times:
        total, _, parts = line.partition(": ")[2].partition(" ms = ")
        values = {word.split()[0]: float(word.split()[1]) for word in parts.split(" + ")}
        assert list(values) == [
            "forward", "backward", "waiting", "reduction", "optimizer", "rest",
        ]  # fmt: skip
        assert sum(values.values()) == pytest.approx(float(total), abs=0.5)
        assert all(values[part] > 0 for part in ("forward", "backward", "optimizer"))


def test_a_reduction_among_the_actions_is_no_waiting():
    times = {"0GATHER0": (0, 1), "0F0": (2, 3), "0B0": (4, 6), "0REDUCE0": (7, 10)}
    spans = [Span(Action.parse(name), *at) for name, at in times.items()]
    executor = SimpleNamespace(spans=spans, started=100.0, ended=111.0)
    parts = SimpleNamespace(executor=executor, engine=SimpleNamespace(step_seconds=0.5))
    watch = StepWatch(None, None, parts, say=print)
    watch._add(12.0)
    assert watch._sums == {
        "forward": 1, "backward": 2, "waiting": 4, "reduction": 3 + 1, "optimizer": 0.5, "rest": 0.5
    }  # fmt: skip
