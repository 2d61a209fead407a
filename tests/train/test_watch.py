"""wall_clock_breakdown, flops_profiler and comms_logger on real ranks: figures recomputed."""

import re
import time
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import record_function

from parallel3d import models
from parallel3d.config import RunConfig
from parallel3d.data.prepare import prepare
from parallel3d.schedule.action import Action, Span
from parallel3d.train import profiler
from parallel3d.train.profiler import StepWatch
from tests.config.styles import SIZES, corpus_in, filled
from tests.train.running import start

pytestmark = pytest.mark.gloo

STEPS = 4
EVERY = 2
MICROBATCHES = 3


@pytest.fixture(scope="module")
def logged_run(tmp_path_factory):
    """The config and rank 0's lines of a run on two stages with everything on."""
    root = tmp_path_factory.mktemp("watch")
    raw = filled({}, corpus_in(root), steps=STEPS, pp=2)
    raw |= {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICROBATCHES,
        "steps_per_print": EVERY,
        "wall_clock_breakdown": True,
        "flops_profiler": {"enabled": True, "profile_step": 2},
        "comms_logger": {"enabled": True},
        "zero_optimization": {"stage": 0},
    }
    raw.pop("train_batch_size", None)
    ranks = start(raw, (2, 1, 1))
    assert [(ended.code, ended.error) for ended in ranks] == [(0, "")] * 2
    assert not any(line.startswith(("time", "comms", "flops")) for line in ranks[1].printed)
    corpus = prepare(RunConfig.from_dict(raw).data)
    return RunConfig.from_dict(raw).resolve(2).with_vocab_size(corpus.vocab_size), ranks[0].printed


def test_parts_of_step_add_up_to_step_time(logged_run):
    _, lines = logged_run
    times = [line for line in lines if line.startswith("time ")]
    steps = [re.match(r"time +step (\d+), pp (\d), mean of (\d+): ", line) for line in times]
    # The second step is profiled, and in no mean.
    expected = [(s, p, count) for s, count in ((2, 1), (4, EVERY)) for p in (0, 1)]
    assert [tuple(map(int, match.groups())) for match in steps] == expected
    for line in times:
        total, _, parts = line.partition(": ")[2].partition(" ms = ")
        values = {word.split()[0]: float(word.split()[1]) for word in parts.split(" + ")}
        assert list(values) == [
            "data",
            "forward",
            "backward",
            "waiting",
            "reduction",
            "optimizer",
            "rest",
        ]
        assert sum(values.values()) == pytest.approx(float(total), abs=0.5)
        assert all(values[part] > 0 for part in ("forward", "backward", "optimizer"))


def test_reduction_among_actions_is_not_counted_as_waiting():
    times = {"0GATHER0": (0, 1), "0F0": (2, 3), "0B0": (4, 6), "0REDUCE0": (7, 10)}
    spans = [Span(Action.parse(name), *at) for name, at in times.items()]
    executor = SimpleNamespace(spans=spans, started=100.0, ended=111.0)
    parts = SimpleNamespace(executor=executor, engine=SimpleNamespace(step_seconds=0.5))
    watch = StepWatch(None, None, parts, say=print)
    assert watch._parts_of(12.0, before_program=0.25) == {
        "data": 0.25,
        "forward": 1,
        "backward": 2,
        "waiting": 4,
        "reduction": 3 + 1,
        "optimizer": 0.5,
        "rest": 0.25,
    }


def test_event_has_means_spreads_and_kinds(monkeypatch):
    """Of the second step, which is profiled, the kinds of its computes alone are kept."""
    events = []
    monkeypatch.setattr(profiler, "record", lambda event, **values: events.append(values))
    off = SimpleNamespace(enabled=False, prof_all=True, prof_ops=[])
    config = SimpleNamespace(wall_clock_breakdown=True, steps_per_print=4, num_steps=4)
    config.comms_logger = config.flops_profiler = off
    config.train = SimpleNamespace(profile=None)
    mesh = SimpleNamespace(rank=0, device=torch.device("cpu"))
    mesh.pipeline = SimpleNamespace(coord=0, size=1)
    mesh.messages = SimpleNamespace(gather_floats=lambda own: [own])
    executor = SimpleNamespace(timed=False, started=0.0, ended=0.0, spans=[])
    engine = SimpleNamespace(timed=False, step_seconds=0.0)
    lines = []
    parts = SimpleNamespace(executor=executor, engine=engine)
    watch = StepWatch(config, mesh, parts, say=lines.append)
    for number, seconds in enumerate((0.1, 9.0, 0.2, 0.6)):
        with watch.around(SimpleNamespace(number=number)):
            assert executor.timed
            with record_function("0F0"):
                torch.ones(64, 64) @ torch.ones(64, 64)
            executor.started = executor.ended = time.time()
            executor.spans = [Span(Action.parse("0F0"), 0.0, seconds)]
            executor.ended += seconds
    (values,) = events
    (rank,) = values["ranks"]
    assert rank["forward"] == pytest.approx(0.3) and rank["steps"] == 3
    assert rank["forward spread"] == pytest.approx(0.2646, rel=1e-3)
    assert 0 < rank["matmul"] < 9 and rank["host"] == pytest.approx(9, abs=0.5)
    assert rank["on core"] > 0 and rank["without core"] >= 0 and rank["threads"] >= 1
    assert lines[0].startswith("time    step 4, mean of 3: ")


def test_calls_and_bytes_are_those_of_the_schedule(logged_run):
    """Each microbatch sends [batch, seq, hidden] in fp32 once each way; the tied embedding is
    summed over its two owners once a step."""
    config, lines = logged_run
    at = next(i for i, line in enumerate(lines) if line.startswith("comms"))
    assert "step 2, one rank of each stage" in lines[at]
    table = {}
    for line in lines[at + 2 :]:
        if not re.match(r" +\d ", line):
            break
        pp, group, ranks, operation, calls, size = line.split()
        table[int(pp), group, operation] = int(ranks), int(calls), float(size)
    message = 2 * SIZES["sequence_length"] * SIZES["hidden_size"] * 4 * MICROBATCHES / 2**20
    embedding = config.model.vocab_size * SIZES["hidden_size"] * 4 / 2**20
    for pp in (0, 1):
        for operation in ("send", "receive"):
            ranks, calls, size = table[pp, "pp=world", operation]
            assert (ranks, calls) == (2, MICROBATCHES)
            assert size == pytest.approx(message, rel=1e-3)
        ranks, calls, size = table[pp, "ends", "all_reduce"]
        assert (ranks, calls) == (2, 1) and size == pytest.approx(embedding, rel=1e-3)


def test_flops_are_our_own_count_and_say_so(logged_run):
    config, lines = logged_run
    (line,) = (line for line in lines if line.startswith("flops"))
    assert "parallel3d's own count" in line and "TFLOP/s per device" in line
    per_token = float(re.search(r"([\d.]+) MFLOP", line)[1]) * 1e6
    expected = models.train_flops_per_token(config.model, config.data.sequence_length)
    assert per_token == pytest.approx(expected, rel=1e-3)
