"""train.batch_schedule: phases, steps, learning rate and messages, against values by hand."""

import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from parallel3d.config.learning_rate import rate
from tests.config.configs import REMOVED, complete, error_of, raw

pytestmark = pytest.mark.pure

TRAIN = "parallel3d.train"
SCHEDULE = f"{TRAIN}.batch_schedule"
GROWING = [[0, 8], ["3K tokens", 16], [64, 32]]  # samples of 128 tokens: 3000 are 24 samples


def config_of(schedule=GROWING, world_size=4, **changes):
    """Mesh pp 2 x dp 1 x tp 2 for 4 ranks, micro batch 2."""
    absent = {"gradient_accumulation_steps": REMOVED}
    values = {SCHEDULE: schedule} | absent | changes
    return RunConfig.from_dict(raw(**values)).resolve(world_size).with_corpus(4096, 10**6)


@pytest.mark.parametrize("world_size", [4, 8, 16])
def test_phases_do_not_depend_on_the_mesh(world_size):
    config = config_of(world_size=world_size, **{f"{TRAIN}.steps": 9})
    dp = world_size // 4
    assert config.batch_phases == ((0, 8), (24, 16), (64, 32))
    sample = 0
    sizes = []
    for _ in range(9):
        sizes.append(config.batch_size_at(sample))
        assert config.num_microbatches_at(sample) * 2 * dp == sizes[-1]
        sample += sizes[-1]
    assert sizes == [8, 8, 8, 16, 16, 16, 32, 32, 32]
    assert config.samples_of_steps(9) == sum(sizes) == sample
    assert [config.samples_of_steps(n) for n in range(8)] == [0, 8, 16, 24, 40, 56, 72, 104]
    assert config.steps_by_size(0, sample) == [(8, 3), (16, 3), (32, 3)]
    assert config.steps_between(40, 71) == 1 and config.steps_between(40, 72) == 2
    assert config.train_batch_size == config.global_batch_size == 8
    assert RunConfig.from_dict(config.to_dict()).resolve(world_size).completed() == config


def test_max_tokens_end_the_run_after_whole_steps():
    limit = {f"{TRAIN}.steps": REMOVED, f"{TRAIN}.max_tokens": 136 * 128}
    config = config_of(**limit)
    assert config.num_steps == 8  # exactly
    assert config.resumed(4, 40).num_steps == 8
    # 16 samples are left out, so the batch of 32 comes a step earlier.
    assert config.resumed(3, 40, 16).num_steps == 7


@pytest.mark.parametrize(
    ("law", "factors"),
    [
        ("none", (1, 1, 1)),
        ("sqrt", (1, 2**0.5, 2)),
        ("linear", (1, 2, 4)),
    ],
)
def test_learning_rate_counts_samples(law, factors):
    """200 samples are 25 steps of the first batch: the rate at a step's last sample."""
    changes = {
        f"{TRAIN}.steps": 10,
        f"{TRAIN}.lr_schedule": {"type": "linear", "min_ratio": 0.2, "warmup_steps": 4},
        f"{TRAIN}.batch_lr": law,
    }
    config = config_of(**changes)
    sizes = [8] * 3 + [16] * 3 + [32] * 4
    sample = 0
    for step, size in enumerate(sizes):
        passed = (sample + size) / 8
        height = min(passed / 4, 1 - 0.8 * (passed - 4) / 21)
        expected = 1e-3 * height * dict(zip((8, 16, 32), factors, strict=True))[size]
        assert rate(config, step, sample) == pytest.approx(expected, rel=1e-12), step
        assert rate(config, step + 5, sample) == rate(config, step, sample)
        sample += size
    assert sample == 200
    law = config.train.batch_lr
    word = {"none": "1", "sqrt": "1.414", "linear": "2"}[law]
    assert any(f"16 from sample 24 (learning rate x {word})" in note for note in config.notes)


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear", "wsd"])
def test_single_phase_has_the_rates_of_a_run_without_schedule(kind):
    curve = {f"{TRAIN}.lr_schedule": {"type": kind, "warmup_steps": 3}}
    plain = complete(**curve)
    config = config_of([[0, 8]], **curve, **{f"{TRAIN}.batch_lr": "linear"})
    for step in range(10):
        assert rate(config, step, 8 * step) == pytest.approx(rate(plain, step), rel=1e-15)


def test_warmup_and_decay_are_limited_in_steps_of_the_first_batch():
    """9 steps are 168 samples: 21 steps of the first batch."""
    steps = {f"{TRAIN}.steps": 9}
    late = {"type": "wsd", "warmup_steps": 6, "decay_steps": 15}
    config = config_of(**steps, **{f"{TRAIN}.lr_schedule": late})
    assert config.train.lr_schedule.decay_steps == 15
    with pytest.raises(ConfigError, match="exceeds the run's 21 steps"):
        config_of(**steps, **{f"{TRAIN}.lr_schedule": late | {"decay_steps": 16}})
    config = config_of(**steps, **{f"{TRAIN}.lr_schedule": {"warmup_steps": 30}})
    assert config.train.lr_schedule.warmup_steps == 21


@pytest.mark.parametrize(
    ("schedule", "rule"),
    [
        ([[1, 8]], "must begin with position 0"),
        ([[0, 8], [64, 16], [64, 8]], "go on with later samples, not [0, 64, 64]"),
        ([[0, 8], [64, 16], [32, 8]], "go on with later samples"),
        ([[0, 8], ["2 lots of tokens", 16]], "must be an integer"),
        ([[0, 8], [64]], "batch_schedule.1"),
        ([[0, 0]], "batch_schedule.0"),
    ],
)
def test_wrong_schedule_is_refused(schedule, rule):
    message = error_of(**{"gradient_accumulation_steps": REMOVED, SCHEDULE: schedule})
    assert rule in message and "1 problem" in message, message


def test_batch_sizes_that_a_mesh_cannot_split_are_refused():
    with pytest.raises(ConfigError) as refused:
        config_of([[0, 12], [48, 16], [96, 20]], world_size=12)
    message = str(refused.value)
    assert message.startswith("1 problem ")
    assert 'parallel3d.train.batch_schedule = "16, 20": ' in message
    assert "dp=3 = 6; use multiples of 6" in message and message.endswith("at most 4")
    full = {"parallel3d.pipeline": {"schedule": "zb_v", "stages_per_rank": 2}}
    with pytest.raises(ConfigError, match="cannot run 'zb_v' with pp=2, microbatches=2"):
        config_of([[0, 8], [48, 4]], **full)


def test_settings_that_contradict_the_schedule_are_refused():
    for changes, rule in (
        ({"train_batch_size": 16}, "is not the first size of parallel3d.train.batch_schedule, 8"),
        ({"scheduler": {"type": "WarmupLR"}}, "counts steps, which have several sizes"),
        ({SCHEDULE: [], f"{TRAIN}.batch_lr": "sqrt"}, "is not read without batch_schedule"),
    ):
        absent = {"gradient_accumulation_steps": REMOVED}
        message = error_of(**{SCHEDULE: GROWING} | absent | changes)
        assert rule in message and "1 problem" in message, message
