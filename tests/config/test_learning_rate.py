"""The learning rate against values worked out by hand, and what holds for every schedule."""

from itertools import pairwise
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.config import LrScheduleConfig, RunConfig
from parallel3d.config.learning_rate import fraction, rate
from tests.config.configs import raw

pytestmark = pytest.mark.pure


def curve(steps, **schedule):
    """The factor of every step of a run."""
    config = LrScheduleConfig(**schedule)
    return [fraction(config, step, steps) for step in range(steps)]


def test_constant_without_warmup_is_one():
    assert curve(5) == [1.0] * 5


def test_constant_after_a_warmup():
    assert curve(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_at_the_eighths_of_a_turn():
    # (1 + cos(180 degrees x k/4)) / 2 for k = 1..4, with cos 45 degrees = sqrt(1/2).
    half = sqrt(0.5)
    by_hand = [(1 + half) / 2, 0.5, (1 - half) / 2, 0.0]
    assert curve(4, type="cosine", min_ratio=0.0) == pytest.approx(by_hand, abs=1e-15)


def test_cosine_with_warmup_and_floor():
    # Two steps up; then 0.2 + 0.8 x (1 + cos(60, 120, 180 degrees)) / 2.
    by_hand = [0.5, 1.0, 0.8, 0.4, 0.2]
    got = curve(5, type="cosine", warmup_steps=2, min_ratio=0.2)
    assert got == pytest.approx(by_hand, abs=1e-15)


def test_linear_with_warmup_and_floor():
    by_hand = [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]
    got = curve(6, type="linear", warmup_steps=2, min_ratio=0.2)
    assert got == pytest.approx(by_hand, abs=1e-15)


def test_wsd_decays_by_the_square_root_over_its_last_steps():
    # Two up, three stable, then 1 - sqrt(1/4, 2/4, 3/4, 4/4) of the way from 1 to 0.2.
    by_hand = [0.5, 1.0, 1.0, 1.0, 1.0, 0.6, 1 - 0.8 * sqrt(0.5), 1 - 0.8 * sqrt(0.75), 0.2]
    got = curve(9, type="wsd", warmup_steps=2, min_ratio=0.2, decay_steps=4)
    assert got == pytest.approx(by_hand, abs=1e-15)


def test_wsd_decays_over_a_fifth_of_the_run_if_nothing_is_said():
    got = curve(20, type="wsd", min_ratio=0.0)
    assert got[:16] == [1.0] * 16
    assert got[16:] == pytest.approx([0.5, 1 - sqrt(0.5), 1 - sqrt(0.75), 0.0], abs=1e-15)
    # but never over the warm-up
    assert curve(5, type="wsd", warmup_steps=4, min_ratio=0.5) == [0.25, 0.5, 0.75, 1.0, 0.5]
    assert curve(20, type="wsd", warmup_steps=19, min_ratio=0.0)[-2:] == [1.0, 0.0]


def test_rate_is_the_optimizers_times_the_fraction():
    schedule = {"type": "linear", "min_ratio": 0.0, "warmup_steps": 2}
    config = RunConfig.from_dict(raw(**{"parallel3d.train.lr_schedule": schedule}))
    rates = [rate(config, step) for step in range(10)]
    assert rates == pytest.approx([1e-3 * f for f in curve(10, **schedule)])
    block = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
    config = RunConfig.from_dict(raw(scheduler=block))
    rates = [rate(config, step) for step in range(7)]
    assert rates == pytest.approx([0.0, 0.0, 2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])


def test_a_run_that_is_all_warmup():
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
def test_every_schedule(run):
    steps, schedule = run
    warmup, floor = schedule["warmup_steps"], schedule["min_ratio"]
    factors = curve(steps, **schedule)
    assert all(0 <= f <= 1 + 1e-12 for f in factors)  # never negative, never above the optimizer's
    rise = factors[:warmup]
    assert rise == pytest.approx([(i + 1) / warmup for i in range(warmup)])
    rest = factors[warmup:]
    if schedule["type"] == "constant":
        assert rest == [1.0] * len(rest)
    elif rest:
        assert rest[-1] == pytest.approx(floor)
        assert all(b <= a + 1e-12 for a, b in pairwise(rest))
        assert min(rest) >= floor - 1e-12
        # Half a cosine and a line are point-symmetric about their middle.
        for k in range(len(rest) - 1 if schedule["type"] != "wsd" else 0):
            assert abs(rest[k] + rest[-2 - k] - (1 + floor)) < 1e-12
