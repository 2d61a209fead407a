"""Paths on the command line without `parallel3d.`; wrong ones are in test_config_bad.py."""

import pytest

from parallel3d.config import Parallel3DConfig, RunConfig
from parallel3d.config.deepspeed_keys import TOP_LEVEL
from parallel3d.config.normalise import full_path

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
    words = "--mesh.pp 2 --model.hidden_size 64 --run.name x --checkpoint.every=7"
    words += " --parallel3d.mesh.tp 2 --bf16.enabled=true"
    config = RunConfig.from_json("ds.json", words.split())
    assert (config.mesh.pp, config.mesh.tp, config.model.hidden_size) == (2, 2, 64)
    assert config.bf16.enabled
    assert (config.run.name, config.checkpoint.every) == ("x", 7)
