"""ds.json is read strictly: every mistake is found at once, with path, value, rule and remedy."""

import json

import pytest
from pydantic import ValidationError

from parallel3d.base.errors import ConfigError
from parallel3d.base.reader import CONFIGS
from parallel3d.config import RunConfig, help_text, settings
from tests.config.configs import error_of, raw

pytestmark = pytest.mark.pure


def test_nested_problems_name_their_full_path():
    path = "parallel3d.data.paths = []"
    assert path in error_of(**{"parallel3d.data.source": "text"})
    path = "parallel3d.train.lr_schedule.warmup_steps = -1: must be at least 0"
    assert path in error_of(**{"parallel3d.train.lr_schedule": {"warmup_steps": -1}})
    path = "optimizer.params.betas.1 = 1.0: must be less than 1"
    assert path in error_of(**{"optimizer.params.betas": [0.9, 1.0]})


def test_all_problems_are_reported_at_once():
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


def test_checks_between_settings_skip_invalid_settings():
    message = error_of(**{"parallel3d.mesh": {"tp": 3, "pp": "x"}})
    assert message.startswith("1 problem ")


def test_removed_settings_at_their_defaults_are_dropped():
    """The config.json of a run before they were removed has them."""
    old = {"parallel3d.mesh.cp_ring": False, "parallel3d.pipeline.scatter_activations": False}
    assert RunConfig.from_dict(raw(**old)).to_dict() == RunConfig.from_dict(raw()).to_dict()


def test_config_is_frozen():
    config = RunConfig.from_dict(raw())
    for section, name in ((config, "gradient_clipping"), (config.mesh, "tp"), (config.model, "x")):
        with pytest.raises(ValidationError):
            setattr(section, name, 1)


def test_exponents_and_optimizer_names_in_any_case_are_accepted():
    config = RunConfig.from_dict(
        raw(**{"zero_optimization.reduce_bucket_size": 5e8, "optimizer.type": "adamw"})
    )
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert config.optimizer.type == "AdamW"
    assert config.optimizer.params.weight_decay == 0.0


def test_int_is_accepted_as_float():
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
            ["train_batch_size = 32", "=2 x", "=4 x dp=2 = 16", "use 16 or"],
        ),
    ],
)
def test_resolve_refuses_contradicting_sizes(changes, world_size, words):
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict(raw(**changes)).resolve(world_size)
    assert all(word in str(caught.value) for word in words)


def test_vocabulary_must_hold_the_tokenizer():
    config = RunConfig.from_dict(raw())
    assert config.with_vocab_size(5000).model.vocab_size == 5000
    larger = RunConfig.from_dict(raw(**{"parallel3d.model.vocab_size": 8192}))
    assert larger.with_vocab_size(5000).model.vocab_size == 8192
    with pytest.raises(ConfigError, match=r"vocab_size = 8192: .* 9000 tokens; use 9000 or more"):
        larger.with_vocab_size(9000)


def test_dict_round_trip():
    config = RunConfig.from_dict(raw()).resolve(4).with_vocab_size(4096)
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))).resolve(4) == config


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda p: p.stem)
def test_shipped_config_loads(path):
    config = RunConfig.from_json(path.name)
    pp = config.mesh.pp
    dp = config.mesh.dp
    tp = config.mesh.tp
    resolved = config.resolve(pp * tp * (1 if dp == "auto" else dp))
    assert resolved.global_batch_size > 0
    assert resolved.train.steps > 0
    again = RunConfig.from_dict(json.loads(json.dumps(resolved.to_dict())))
    assert again.to_dict() == resolved.to_dict()


def test_help_lists_every_setting_with_its_doc_and_default():
    text = help_text()
    unwrapped = " ".join(text.split())
    assert '--parallel3d.mesh.dp integer | "auto" (default' in text
    assert "--zero_optimization.stage 0 | 1 | 2 | 3 (required)" in text
    for setting in settings():
        assert setting.doc, setting
        default = f"default {setting.default}" if setting.default else "required"
        assert f"--{setting.path} {setting.type} ({default}" in unwrapped
        assert " ".join(setting.doc.split()) in unwrapped
    for path in ("parallel3d.model.rope_theta", "scheduler.params.cos_min_ratio"):
        only = next(s.only for s in settings() if s.path == path)
        assert only in ('family "llama", "moe"', 'type "WarmupCosineLR"')
        assert f"{only} only)" in unwrapped


@pytest.mark.parametrize("name", ["a b", "Größe 3", "模型-1", "run.1", "1e-3", "x" * 100, "a..b"])
def test_run_name_may_have_letters_of_any_script(name):
    assert RunConfig.from_dict(raw(**{"parallel3d.run.name": name})).run.name == name


PATHS = [
    "parallel3d.run.directory",
    "parallel3d.data.cache",
    "parallel3d.data.paths",
    "parallel3d.data.tokenizer",
    "parallel3d.data.name",
    "parallel3d.data.validation.mine.paths",
    "parallel3d.checkpoint.resume",
    "parallel3d.checkpoint.in_memory_folder",
    "zero_optimization.offload_optimizer.nvme_path",
    "tensorboard.output_path",
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("text", "expected"),
    [("~/runs", "{home}/runs"), ("$SCRATCH/a", "/scratch/a"), ("x/${SCRATCH}", "x//scratch")],
)
def test_paths_have_the_users_folder_and_environment_variables(monkeypatch, path, text, expected):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch")
    section, _, name = path.rpartition(".")
    block = {"device": "nvme", "pin_memory": True} if "offload" in path else {}
    block |= {"enabled": False} if section == "tensorboard" else {}
    if section.startswith("parallel3d.data"):
        block |= {"name": {"source": "hub"}, "paths": {"source": "text"}}.get(name, {})
    changes = {section: block | {name: text}}
    if "validation" in section:
        changes = {"parallel3d.data": {"validation": {"mine": changes[section]}}}
    if "offload" in path:
        changes = {"zero_optimization.stage": 3} | changes
    config = RunConfig.from_dict(raw(**merged(changes)))
    read = config.to_dict()
    for key in path.split("."):
        read = read[key]
    assert read in (expected.format(home="/home/me"), [expected.format(home="/home/me")])
    monkeypatch.delenv("SCRATCH")
    if "SCRATCH" in text:
        with pytest.raises(ConfigError, match=f"{name}.* = .*variable SCRATCH, which is not set"):
            RunConfig.from_dict(raw(**merged(changes)))


def merged(changes):
    """The changes, each key of a block on its own, so that the block keeps its others."""
    single = {}
    for path, value in changes.items():
        if isinstance(value, dict):
            single |= {f"{path}.{key}": item for key, item in value.items()}
        else:
            single[path] = value
    return single
