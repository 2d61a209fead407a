"""ds.json is read strictly: every mistake is found at once, with path, value, rule and remedy."""

import json
from copy import deepcopy

import pytest
from pydantic import ValidationError

from parallel3d.config import RunConfig, help_text, settings
from parallel3d.config.reader import CONFIGS, apply_overrides
from parallel3d.errors import ConfigError

MINIMAL = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": {"params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 1},
    "parallel3d": {
        "mesh": {"pp": 2, "tp": 2},
        "model": {
            "family": "gpt",
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 16,
        },
        "data": {"sequence_length": 128},
        "train": {"steps": 10},
    },
}
REMOVED = object()


def raw(**changes):
    """MINIMAL with the values of dotted paths changed, or removed."""
    result = deepcopy(MINIMAL)
    for path, value in changes.items():
        *sections, key = path.split(".")
        block = result
        for section in sections:
            block = block.setdefault(section, {})
        block[key] = value
        if value is REMOVED:
            del block[key]
    return result


def error_of(**changes) -> str:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict(raw(**changes))
    return str(caught.value)


# path, value, and what the message must say beside path and value: the rule and the remedy
BAD = [
    # types
    ("parallel3d.train.steps", "100", "must be an integer", "without quotes"),
    ("parallel3d.train.steps", 100.0, "must be an integer", "without quotes, point"),
    ("parallel3d.train.steps", True, "must be an integer", "write a whole number"),
    ("parallel3d.run.tensorboard", "true", "must be true or false", "without quotes"),
    ("parallel3d.run.tensorboard", 1, "must be true or false", "write true or false"),
    ("optimizer.params.lr", "1e-3", "must be a number", "without quotes"),
    ("optimizer.params.betas", 0.9, "must be a list", "write [...]"),
    ("optimizer.params.betas", [0.9, 0.95, 0.99], "too many items", "exactly 2"),
    ("parallel3d.mesh", 8, "block of settings", "{...}"),
    ("parallel3d.model", 8, "block of settings", "{...}"),
    ("parallel3d.run.directory", 5, "must be a string", "double quotes"),
    ("parallel3d.mesh.tp", None, "must be an integer", "write a whole number"),
    # ranges
    ("optimizer.params.lr", 0.0, "greater than 0", "raise it"),
    ("optimizer.params.lr", float("nan"), "finite", "finite number"),
    ("optimizer.params.eps", 0.0, "greater than 0", "raise it"),
    ("optimizer.params.weight_decay", -0.1, "at least 0", "0 or more"),
    ("gradient_clipping", -1.0, "at least 0", "0 or more"),
    ("parallel3d.mesh.dp", 0, "greater than 0", '"auto"'),
    ("parallel3d.data.held_out_fraction", 0.5, "less than 0.5", "lower it"),
    ("parallel3d.data.vocab_size", 256, "at least 257", "257 or more"),
    ("parallel3d.model.resid_pdrop", 1.0, "less than 1", "lower it"),
    ("parallel3d.run.name", "a/b", "plain name", "without /"),
    # unknown keys
    ("zero_optimisation", {"stage": 3}, "no setting", 'nearest one is "zero_optimization"'),
    ("parallel3d.mesh.pipeline", 2, "no setting", "did you mean|this block has: pp, dp, tp"),
    ("parallel3d.model.hiden_size", 64, "no setting", '"hidden_size"'),
    ("zero_optimization.stage3_max_live_parameter", 0, "no setting", "_max_live_parameters"),
    ("steps", 100, "no setting here", "did you mean parallel3d.train.steps"),
    # known values and keys that are refused by name
    ("zero_optimization.stage", 0, "not yet supported", "use 1"),
    ("zero_optimization.stage", 2, "not yet supported", "per_microbatch"),
    ("zero_optimization.stage", 4, "must be 1 or 3", "write 1 or 3"),
    ("zero_optimization.stage", True, "must be 1 or 3", "write 1 or 3"),
    ("zero_optimization.stage", "3", "must be 1 or 3", "write 1 or 3"),
    ("zero_optimization.offload_optimizer", {"device": "nvme"}, "not yet supported", '"cpu"'),
    ("zero_optimization.offload_param", {"device": "cpu"}, "not yet", "offload the optimizer"),
    ("zero_optimization.zero_quantized_weights", True, "not yet supported", "remove it"),
    ("zero_optimization.mics_shard_size", 8, "removed from DeepSpeed", "remove it"),
    ("fp16", {"enabled": True}, "not yet supported", "bf16"),
    ("bf16.enabled", "auto", "cannot be auto", "auto may be: train_batch_size"),
    ("scheduler", {"type": "WarmupLR"}, "not yet supported", "parallel3d.train.lr_schedule"),
    ("wandb", {"enabled": True}, "not yet supported", "parallel3d.run.tensorboard"),
    ("optimizer.type", "Lion", "not yet supported", '"AdamW"'),
    ("optimizer.type", "SGD", 'must be "AdamW" or "Adam"', 'write "AdamW"'),
    ("optimizer.params.torch_adam", True, "not yet supported", "remove it"),
    ("parallel3d.mesh", "plan", "not yet supported", '"dp": "auto"'),
    ("parallel3d.pipeline.schedule", "interleaved", "not yet run", "use gpipe"),
    ("parallel3d.pipeline.schedule", "zigzag", "names no file", "gpipe, one_f_one_b"),
    ("parallel3d.pipeline.stages_per_rank", 2, "not yet supported", "use 1"),
    ("parallel3d.checkpoint", {"every": 1}, "later version", "remove it"),
    ("parallel3d.model.family", "bert", "no model family", "gpt"),
    ("parallel3d.run.hardware", "abacus", "not described", "H100-SXM5-80GB"),
    # between settings
    ("parallel3d.mesh.tp", 3, "divide num_attention_heads=16", "use tp = 1, 2, 4, 8 or 16"),
    ("parallel3d.model.intermediate_size", 255, "not a multiple of tp=2", "use 256"),
    ("parallel3d.mesh.pp", 7, "6 layers", "pp = 6 or less"),
    ("parallel3d.model.num_attention_heads", 6, "divide hidden_size=64", "use 4 heads"),
    ("parallel3d.model.vocab_size", 1000, "tokenizer's 4096 tokens", 'use 4096 or more, or "auto"'),
    ("parallel3d.data.sequence_length", 2048, "max_position_embeddings=1024", "at most 1024"),
    ("parallel3d.data.paths", ["a.txt"], 'not read by source "python-stdlib"', "remove it"),
]


@pytest.mark.parametrize(("path", "value", "rule", "remedy"), BAD)
def test_bad_value_is_named_with_rule_and_remedy(path, value, rule, remedy):
    message = error_of(**{path: value})
    inner = next(iter(value)) if isinstance(value, dict) else None
    leaf = value[inner] if f"{path}.{inner} = " in message else value
    line = next(line for line in message.splitlines()[1:] if path in line)
    assert f" = {json.dumps(leaf)}: " in line
    assert rule in line
    assert any(choice in line for choice in remedy.split("|"))


@pytest.mark.parametrize(
    "path",
    [
        "train_micro_batch_size_per_gpu",
        "optimizer",
        "optimizer.params.lr",
        "zero_optimization.stage",
        "parallel3d",
        "parallel3d.model.hidden_size",
        "parallel3d.train.steps",
    ],
)
def test_missing_setting(path):
    assert f"{path}: is required; add it: " in error_of(**{path: REMOVED})


def test_nested_problems():
    path = "parallel3d.data.paths = []"
    assert path in error_of(**{"parallel3d.data.source": "text"})
    path = "parallel3d.train.lr_schedule.warmup_steps = 11: is longer than the run of 10 steps"
    assert path in error_of(**{"parallel3d.train.lr_schedule": {"warmup_steps": 11}})
    path = "optimizer.params.betas.1 = 1.0: must be less than 1"
    assert path in error_of(**{"optimizer.params.betas": [0.9, 1.0]})


def test_all_problems_at_once():
    """Also those between settings, where the settings are sound by themselves."""
    message = error_of(
        **{
            "zero_optimisation": {},
            "bf16": {"enabled": "yes"},
            "parallel3d.mesh.tp": 3,
            "parallel3d.train.steps": 1.5,
            "parallel3d.run": {"nam": "x"},
        }
    )
    assert message.startswith("5 problems")
    for path in ("zero_optimisation", "bf16.enabled", "parallel3d.mesh.tp", "parallel3d.run.nam"):
        assert f"\n  {path} = " in message


def test_checks_between_settings_leave_out_what_is_broken():
    message = error_of(**{"parallel3d.mesh": {"tp": 3, "pp": "x"}})
    assert message.startswith("1 problem ")


def test_config_is_frozen():
    config = RunConfig.from_dict(raw())
    for section, name in ((config, "gradient_clipping"), (config.mesh, "tp"), (config.model, "x")):
        with pytest.raises(ValidationError):
            setattr(section, name, 1)


def test_deepspeed_writes_sizes_with_exponents_and_optimizers_in_any_case():
    config = RunConfig.from_dict(
        raw(**{"zero_optimization.reduce_bucket_size": 5e8, "optimizer.type": "adamw"})
    )
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert config.optimizer.type == "AdamW"
    assert config.optimizer.params.weight_decay == 0.0


def test_int_where_a_float_is_expected():
    assert RunConfig.from_dict(raw(gradient_clipping=1)).gradient_clipping == 1.0


def test_resolve_fills_dp_and_batch():
    config = RunConfig.from_dict(raw()).resolve(12)
    assert (config.mesh.pp, config.mesh.dp, config.mesh.tp) == (2, 3, 2)
    assert config.num_microbatches == 4
    assert config.train_batch_size == config.global_batch_size == 2 * 4 * 3
    assert config.tokens_per_step == 24 * 128
    assert config.resolve(12) == config


def test_auto_pp_and_tp_mean_one():
    config = RunConfig.from_dict(raw(**{"parallel3d.mesh": {"pp": "auto", "tp": "auto"}}))
    assert str(config.resolve(4).mesh) == "pp=1 x dp=4 x tp=1"


@pytest.mark.parametrize(
    ("changes", "world_size", "words"),
    [
        ({}, 6, ["pp=2 x tp=2 = 4 does not divide 6 processes", "start 4 processes"]),
        ({}, 2, ["does not divide 2 processes", "start 4 processes"]),
        (
            {"parallel3d.mesh.dp": 2},
            4,
            ["mesh.dp = 2: pp=2 x dp=2 x tp=2 is 8 ranks", "start 8 processes, or set dp to 1"],
        ),
        (
            {"train_batch_size": 32},
            8,
            ["train_batch_size = 32", "=2 x", "=4 x dp=2 = 16", "accumulation_steps = 8"],
        ),
    ],
)
def test_resolve_refuses(changes, world_size, words):
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict(raw(**changes)).resolve(world_size)
    assert all(word in str(caught.value) for word in words)


def test_batch_is_checked_early_where_dp_is_given():
    assert "train_batch_size = 9" in error_of(**{"parallel3d.mesh.dp": 1, "train_batch_size": 9})


def test_vocabulary_of_the_tokenizer():
    config = RunConfig.from_dict(raw())
    assert config.with_vocab_size(5000).model.vocab_size == 5000
    larger = RunConfig.from_dict(raw(**{"parallel3d.model.vocab_size": 8192}))
    assert larger.with_vocab_size(5000).model.vocab_size == 8192
    with pytest.raises(ConfigError, match=r"vocab_size = 8192: .* 9000 tokens; use 9000 or more"):
        larger.with_vocab_size(9000)


def test_dict_round_trip():
    config = RunConfig.from_dict(raw()).resolve(4).with_vocab_size(4096)
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_every_setting_has_type_default_and_doc():
    listed = {setting.path: setting for setting in settings()}
    assert all(setting.doc for setting in listed.values())
    assert listed["parallel3d.mesh.dp"].type == 'integer | "auto"'
    assert listed["parallel3d.train.steps"].default == ""
    assert listed["parallel3d.model.hidden_size"].type == "integer"
    assert "--zero_optimization.stage 1 | 3 (required)" in help_text()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda p: p.stem)
def test_shipped_config_loads(path):
    assert RunConfig.from_json(path.name).resolve(1).global_batch_size > 0


def test_overrides_reach_the_config():
    config = RunConfig.from_json("ds.json", ["--parallel3d.mesh.tp", "2", "--bf16.enabled=true"])
    assert config.mesh.tp == 2
    assert config.bf16.enabled
    with pytest.raises(ConfigError, match="the nearest one is"):
        RunConfig.from_json("ds.json", ["--parallel3d.msh.tp", "2"])


def test_default_config_is_unchanged_by_overrides():
    base = raw()
    apply_overrides(base, ["--parallel3d.mesh.tp", "4"])
    assert RunConfig.from_dict(base).mesh.tp == 4
    assert MINIMAL["parallel3d"]["mesh"]["tp"] == 2
