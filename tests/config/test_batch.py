"""Batch sizes: which one follows from the others, and that a run that resumes keeps its batch."""

import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from parallel3d.config.normalise import apply_overrides
from tests.config.configs import REMOVED, raw

pytestmark = pytest.mark.pure

BATCH = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
ONE_RANK = {"parallel3d.mesh": {}}


def sizes(config):
    return config.train_batch_size, config.micro_batch_size, config.num_microbatches


def resolved(words, ranks, **changes):
    """The config of the changed file with a command line of `words`."""
    file = raw(**ONE_RANK | changes)
    apply_overrides(file, words.split())
    return RunConfig.from_dict(file).resolve(ranks)


@pytest.mark.parametrize(
    ("words", "file", "expected"),
    [
        (f"--{BATCH} 32", {}, (32, 2, 8)),
        (f"--{BATCH} 32 --{ACCUMULATION} auto", {}, (32, 2, 8)),
        (f"--{BATCH} 32 --{ACCUMULATION} 2", {}, (32, 8, 2)),
        (f"--{BATCH} 32 --{MICRO} auto", {}, (32, 4, 4)),
        (f"--{BATCH} 32 --{MICRO} 1", {}, (32, 1, 16)),
        (f"--{BATCH} 32 --{MICRO} auto --{ACCUMULATION} auto", {}, (32, 16, 1)),
        (f"--{MICRO} 1", {BATCH: 16}, (16, 1, 8)),
        (f"--{ACCUMULATION} 2", {BATCH: 16}, (16, 4, 2)),
        (f"--{MICRO} 1 --{ACCUMULATION} 3", {BATCH: 16}, (6, 1, 3)),
        (f"--{MICRO} 1", {}, (8, 1, 4)),
        ("--train.batch_schedule [[0,32],[320,64]]", {}, (32, 2, 8)),
        ("--mesh.tp 2", {BATCH: 8, "parallel3d.mesh": {"tp": 1}}, (8, 2, 4)),
        ("--mesh.tp 1", {BATCH: 8, "parallel3d.mesh": {"tp": 2}}, (8, 2, 2)),
    ],
)
def test_command_line_sets_a_size_and_the_file_s_last_one_follows(words, file, expected):
    assert sizes(resolved(words, 2, **file)) == expected


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ({BATCH: 32, ACCUMULATION: "auto"}, (32, 2, 8)),
        ({BATCH: 32, MICRO: "auto"}, (32, 4, 4)),
        ({BATCH: "auto"}, (16, 2, 4)),
        ({BATCH: 32, MICRO: "auto", ACCUMULATION: "auto"}, (32, 16, 1)),
        ({BATCH: "auto", ACCUMULATION: "auto"}, (4, 2, 1)),
        ({MICRO: "auto"}, (64, 8, 4)),
        ({ACCUMULATION: "auto", "parallel3d.train.batch_schedule": [[0, 8], [80, 16]]}, (8, 2, 2)),
    ],
    ids=str,
)
def test_auto_is_what_follows_from_the_other_two(file, expected):
    assert sizes(resolved("", 2, **file)) == expected


def test_sizes_that_contradict_each_other_in_one_place_are_refused():
    words = f"--{BATCH} 33 --{MICRO} 2 --{ACCUMULATION} 4"
    for command_line, file in ((words, {}), ("", {BATCH: 33}), ("", {BATCH: 32})):
        with pytest.raises(ConfigError) as caught:
            resolved(command_line, 2, **file)
        assert f"{BATCH} = {file.get(BATCH, 33)}: is not" in str(caught.value)
        assert (f'"{ACCUMULATION}": "auto"' in str(caught.value)) == (file == {BATCH: 32})


ZB_V = {"parallel3d.pipeline": {"schedule": "zb_v", "stages_per_rank": 2}}


@pytest.mark.parametrize(
    ("ranks", "changes", "batch", "expected"),
    [
        (4, {}, 16, (16, 2, 2)),
        (1, {}, 16, (16, 2, 8)),
        (8, {}, 16, (16, 2, 1)),
        (16, {}, 16, (16, 1, 1)),
        (2, {MICRO: 16}, 16, (16, 8, 1)),
        (2, {MICRO: 6}, 16, (16, 4, 2)),
        (4, {"parallel3d.mesh": {"tp": 2}}, 16, (16, 2, 4)),
        # This schedule needs 3 microbatches for 2 pipeline ranks.
        (4, {"parallel3d.mesh": {"pp": 2}} | ZB_V, 8, (8, 1, 4)),
        # Another batch is asked for by its name.
        (4, {BATCH: 64, ACCUMULATION: None}, 16, (64, 2, 8)),
        (4, {"parallel3d.train.batch_schedule": [[0, 32], [320, 64]]}, 16, (32, 2, 4)),
    ],
)
def test_run_that_resumes_keeps_its_batch(ranks, changes, batch, expected):
    length = {"parallel3d.train.steps": REMOVED, "parallel3d.train.max_tokens": 10**6}
    config = RunConfig.from_dict(raw(**ONE_RANK | length | changes)).resolve(ranks, batch)
    assert sizes(config) == expected
    assert config.train.steps == config.steps_between(0, 10**6 // 128)


def test_batch_that_no_micro_batch_divides_is_refused():
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict(raw(**ONE_RANK)).resolve(3, 16)
    assert f"{BATCH} = 16: of the run that resumes" in str(caught.value)
    assert f"dp=3; use a dp of 1, 2, 4, 8, 16, or ask for --{BATCH} 12 or 18" in str(caught.value)
