"""What sets the learning rate, fitted to the length of the run."""

import pytest

from parallel3d.config import RunConfig
from parallel3d.config.learning_rate import rate
from tests.config.configs import error_of, raw

pytestmark = pytest.mark.pure

LR = "parallel3d.train.lr_schedule"


def test_a_warm_up_longer_than_the_run_ends_with_it_and_says_so():
    config = RunConfig.from_json("ds.json", ["--train.steps", "6"])
    assert (config.train.steps, config.train.lr_schedule.warmup_steps) == (6, 6)
    assert config.notes == (
        "parallel3d.train.lr_schedule.warmup_steps: 10 is longer than the run of 6 steps; "
        "the warm-up takes 6",
    )
    config = config.resolve(1).with_corpus(2048, 10**6)
    peak = config.optimizer.params.lr
    assert [rate(config, step) / peak for step in range(6)] == pytest.approx(
        [n / 6 for n in range(1, 7)]
    )
    assert len(config.notes) == 1  # once


def test_a_warm_up_that_fits_is_left_alone():
    config = RunConfig.from_dict(raw(**{f"{LR}": {"warmup_steps": 10}}))
    assert config.train.lr_schedule.warmup_steps == 10 and not config.notes


@pytest.mark.parametrize(("train", "known"), [({"max_tokens": 3 * 8 * 128}, 4), ({"epochs": 1}, 4)])
def test_steps_that_are_known_later(train, known):
    train = train | {"lr_schedule": {"type": "cosine", "warmup_steps": 4}}
    config = RunConfig.from_dict(raw(**{"parallel3d.train": train}))
    assert config.train.lr_schedule.warmup_steps == known and not config.notes
    config = config.resolve(4).with_corpus(4096, 3 * 8 * 128 + 1)
    assert (config.num_steps, config.train.lr_schedule.warmup_steps) == (3, 3)
    assert "4 is longer than the run of 3 steps" in config.notes[0]


def test_the_decay_has_its_steps_before_a_warm_up_that_is_too_long():
    block = {"type": "wsd", "warmup_steps": 50, "decay_steps": 4}
    assert RunConfig.from_dict(raw(**{LR: block})).train.lr_schedule.warmup_steps == 6
    assert "decay_steps = 11: and warmup_steps=" in error_of(**{LR: block | {"decay_steps": 11}})


def test_a_scheduler_whose_length_is_the_runs():
    params = {"total_num_steps": "auto", "warmup_num_steps": 1000}
    config = RunConfig.from_dict(raw(scheduler={"type": "WarmupDecayLR", "params": params}))
    assert config.scheduler.params.total_num_steps == 10
    assert config.scheduler.params.warmup_num_steps == 10
    assert "scheduler.params.warmup_num_steps: 1000 is longer" in config.notes[0]
    # Without a length of its own it has DeepSpeed's meaning: it goes on rising.
    config = RunConfig.from_dict(raw(scheduler={"type": "WarmupLR"}))
    assert config.scheduler.params.warmup_num_steps == 1000 and not config.notes
