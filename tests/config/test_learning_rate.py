"""The learning rate against values worked out by hand, and fitted to the length of a run."""

from itertools import pairwise
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.config import LrScheduleConfig, RunConfig
from parallel3d.config.learning_rate import fraction, rate
from tests.config.configs import complete, error_of, raw

pytestmark = pytest.mark.pure

LR = "parallel3d.train.lr_schedule"


def curve(steps, **schedule):
    """The factor of every step of a run."""
    config = LrScheduleConfig(**schedule)
    return [fraction(config, step, steps) for step in range(steps)]


HALF = sqrt(0.5)
BY_HAND = [
    ({}, [1.0] * 5),
    ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
    # (1 + cos(180 degrees x k/4)) / 2 for k = 1..4, with cos 45 degrees = sqrt(1/2).
    ({"type": "cosine", "min_ratio": 0.0}, [(1 + HALF) / 2, 0.5, (1 - HALF) / 2, 0.0]),
    # Two steps up; then 0.2 + 0.8 x (1 + cos(60, 120, 180 degrees)) / 2.
    ({"type": "cosine", "warmup_steps": 2, "min_ratio": 0.2}, [0.5, 1.0, 0.8, 0.4, 0.2]),
    ({"type": "linear", "warmup_steps": 2, "min_ratio": 0.2}, [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]),
    # Two up, three stable, then 1 - sqrt(1/4, 2/4, 3/4, 4/4) of the way from 1 to 0.2.
    ({"type": "wsd", "warmup_steps": 2, "min_ratio": 0.2, "decay_steps": 4},
     [0.5, 1.0, 1.0, 1.0, 1.0, 0.6, 1 - 0.8 * HALF, 1 - 0.8 * sqrt(0.75), 0.2]),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "factors"), BY_HAND)
def test_factors_equal_values_by_hand(schedule, factors):
    assert curve(len(factors), **schedule) == pytest.approx(factors, abs=1e-15)


def test_wsd_decays_over_a_fifth_of_the_run_by_default():
    factors = curve(20, type="wsd", min_ratio=0.0)
    assert factors[:16] == [1.0] * 16
    assert factors[16:] == pytest.approx([0.5, 1 - sqrt(0.5), 1 - sqrt(0.75), 0.0], abs=1e-15)
    # but never over the warm-up
    assert curve(5, type="wsd", warmup_steps=4, min_ratio=0.5) == [0.25, 0.5, 0.75, 1.0, 0.5]
    assert curve(20, type="wsd", warmup_steps=19, min_ratio=0.0)[-2:] == [1.0, 0.0]


def test_rate_is_the_optimizer_rate_times_the_fraction():
    schedule = {"type": "linear", "min_ratio": 0.0, "warmup_steps": 2}
    config = complete(**{"parallel3d.train.lr_schedule": schedule})
    rates = [rate(config, step) for step in range(10)]
    assert rates == pytest.approx([1e-3 * f for f in curve(10, **schedule)])
    block = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
    config = complete(scheduler=block)
    rates = [rate(config, step) for step in range(7)]
    assert rates == pytest.approx([0.0, 0.0, 2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])


def test_run_may_be_all_warmup():
    for kind in ("constant", "cosine", "linear", "wsd"):
        assert curve(4, type=kind, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0]
    assert curve(1, type="cosine", min_ratio=0.1) == pytest.approx([0.1])


@st.composite
def runs(draw):
    steps = draw(st.integers(1, 50))
    return steps, {
        "type": draw(st.sampled_from(["constant", "cosine", "linear", "wsd"])),
        "warmup_steps": draw(st.integers(0, steps)),
        "min_ratio": draw(st.floats(0, 1)),
    }


@given(runs())
def test_factors_of_every_schedule_stay_within_bounds(run):
    steps, schedule = run
    warmup = schedule["warmup_steps"]
    floor = schedule["min_ratio"]
    factors = curve(steps, **schedule)
    assert all(0 <= f <= 1 + 1e-12 for f in factors)  # never negative, never above the optimizer's
    rise = factors[:warmup]
    assert rise == pytest.approx([(i + 1) / warmup for i in range(warmup)])
    decay = factors[warmup:]
    if schedule["type"] == "constant":
        assert decay == [1.0] * len(decay)
    elif decay:
        assert decay[-1] == pytest.approx(floor)
        assert all(b <= a + 1e-12 for a, b in pairwise(decay))
        assert min(decay) >= floor - 1e-12
        # Half a cosine and a line are point-symmetric about their middle.
        for k in range(len(decay) - 1 if schedule["type"] != "wsd" else 0):
            assert abs(decay[k] + decay[-2 - k] - (1 + floor)) < 1e-12


def test_too_long_warmup_is_cut_with_a_note():
    config = RunConfig.from_json("ds.json", ["--train.steps", "6"])
    assert (config.train.steps, config.train.lr_schedule.warmup_steps) == (6, 6)
    (note,) = config.notes
    assert note.startswith("parallel3d.train.lr_schedule.warmup_steps: 10 exceeds")
    assert note.endswith("cut to 6")
    config = config.resolve(1).with_corpus(2048, 10**6)
    peak = config.optimizer.params.lr
    factors = [rate(config, step) / peak for step in range(6)]
    assert factors == pytest.approx([n / 6 for n in range(1, 7)])
    assert len(config.notes) == 1  # once


def test_fitting_warmup_is_unchanged():
    config = RunConfig.from_dict(raw(**{f"{LR}": {"warmup_steps": 10}}))
    assert config.train.lr_schedule.warmup_steps == 10 and not config.notes


@pytest.mark.parametrize(("train", "known"), [({"max_tokens": 3 * 8 * 128}, 4), ({"epochs": 1}, 4)])
def test_warmup_is_cut_once_the_steps_are_known(train, known):
    train = train | {"lr_schedule": {"type": "cosine", "warmup_steps": 4}}
    config = RunConfig.from_dict(raw(**{"parallel3d.train": train}))
    assert config.train.lr_schedule.warmup_steps == known and not config.notes
    config = config.resolve(4).with_corpus(4096, 3 * 8 * 128 + 1)
    assert (config.num_steps, config.train.lr_schedule.warmup_steps) == (3, 3)
    assert "4 exceeds the run's 3 steps" in config.notes[0]


def test_too_long_warmup_leaves_room_for_the_decay():
    block = {"type": "wsd", "warmup_steps": 50, "decay_steps": 4}
    assert RunConfig.from_dict(raw(**{LR: block})).train.lr_schedule.warmup_steps == 6
    assert "decay_steps = 11: plus warmup_steps=" in error_of(**{LR: block | {"decay_steps": 11}})


def test_scheduler_with_auto_length_takes_that_of_the_run():
    params = {"total_num_steps": "auto", "warmup_num_steps": 5}
    config = RunConfig.from_dict(raw(scheduler={"type": "WarmupDecayLR", "params": params}))
    assert config.scheduler.params.total_num_steps == 10
    assert config.scheduler.params.warmup_num_steps == 5
    # Without a length of its own it has DeepSpeed's meaning: it goes on rising.
    config = RunConfig.from_dict(raw(scheduler={"type": "WarmupLR"}))
    assert config.scheduler.params.warmup_num_steps == 1000 and not config.notes
