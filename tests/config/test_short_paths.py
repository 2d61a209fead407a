"""Paths on the command line without `parallel3d.`, and what is said of those that are wrong."""

import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.config import Parallel3DConfig, RunConfig
from parallel3d.config.command_line import full_path
from parallel3d.config.deepspeed_keys import TOP_LEVEL
from tests.config.configs import LLAMA, error_of

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("mesh.pp", "parallel3d.mesh.pp"),
        ("mesh", "parallel3d.mesh"),
        ("model.hidden_size", "parallel3d.model.hidden_size"),
        ("run.name", "parallel3d.run.name"),
        ("train.lr_schedule.type", "parallel3d.train.lr_schedule.type"),
        ("parallel3d.mesh.pp", "parallel3d.mesh.pp"),
        # DeepSpeed has blocks of these names, with other keys
        ("checkpoint.every", "parallel3d.checkpoint.every"),
        ("checkpoint.evry", "parallel3d.checkpoint.evry"),
        ("checkpoint.tag_validation", "checkpoint.tag_validation"),
        ("checkpoint", "checkpoint"),
        ("pipeline.schedule", "parallel3d.pipeline.schedule"),
        ("pipeline.stages", "pipeline.stages"),
        ("optimizer.params.lr", "optimizer.params.lr"),
        ("zero_optimization.stage", "zero_optimization.stage"),
        ("steps", "steps"),
    ],
)
def test_full_path(path, expected):
    assert full_path(path) == expected


def test_no_setting_of_ours_has_the_path_of_a_key_of_deepspeeds():
    assert not set(Parallel3DConfig.model_fields) & set(RunConfig.model_fields)
    shared = set(Parallel3DConfig.model_fields) & set(TOP_LEVEL)
    assert shared == {"checkpoint", "pipeline"}
    for section in shared:
        ours = Parallel3DConfig.model_fields[section].annotation.model_fields
        assert TOP_LEVEL[section].items and not set(ours) & set(TOP_LEVEL[section].items)


def test_short_paths_reach_the_default_config():
    words = "--mesh.pp 2 --model.hidden_size 64 --run.name x --checkpoint.every=7 --mesh.tp 2"
    config = RunConfig.from_json("ds.json", words.split())
    assert (config.mesh.pp, config.mesh.tp, config.model.hidden_size) == (2, 2, 64)
    assert (config.run.name, config.checkpoint.every) == ("x", 7)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--mesh.ppp 2", 'parallel3d.mesh.ppp = 2: is no setting; the nearest one is "pp"'),
        ("--mseh.pp 2", 'mseh = {"pp": 2}: is no setting here; did you mean parallel3d.mesh?'),
        (
            "--checkpoint.evry 2",
            'parallel3d.checkpoint.evry = 2: is no setting; the nearest one is "every"',
        ),
        ("--run.nam x", 'parallel3d.run.nam = "x": is no setting; the nearest one is "name"'),
        (
            "--model.family llama --model.embd_pdrop 0.1",
            'parallel3d.model.embd_pdrop = 0.1: is a setting of family "gpt" alone',
        ),
    ],
)  # fmt: skip
def test_what_is_said_of_a_wrong_one(words, said):
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_json("ds.json", words.split())
    assert said in str(caught.value)


def test_a_block_in_the_wrong_place_is_named_with_the_right_one():
    for block in ("mesh", "model", "data", "train", "run"):
        said = f'{block} = {{"a": 1}}: is no setting here; did you mean parallel3d.{block}?'
        assert said in error_of(**{block: {"a": 1}})
    said = error_of(**{"parallel3d.zero_optimization": {"stage": 3}})
    assert 'did you mean zero_optimization, outside the block "parallel3d"?' in said
    assert "did you mean parallel3d.train.steps?" in error_of(**{"parallel3d.steps": 5})


def test_what_only_another_family_has():
    said = error_of(**{"parallel3d.model": LLAMA | {"embd_pdrop": 0.1}})
    line = next(line for line in said.splitlines() if "embd_pdrop" in line)
    assert (
        'is a setting of family "gpt" alone; remove it; this block has: from_pretrained, ' in line
    )
    assert line.count("embd_pdrop") == 1 and "rms_norm_eps" in line
    said = error_of(scheduler={"type": "WarmupLR", "params": {"cycle_max_lr": 1e-3}})
    assert 'cycle_max_lr = 0.001: is a setting of type "OneCycle" alone' in said
