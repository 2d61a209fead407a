"""DeepSpeed's own keys: what is accepted and left out, old names, "auto", and batch arithmetic."""

import json
import re
from functools import reduce
from math import prod
from operator import getitem

import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from parallel3d.config.arithmetic import samples_of_epochs
from parallel3d.config.deepspeed_keys import ANY, BY_SECTION
from parallel3d.config.deepspeed_keys import REMOVED as GONE
from parallel3d.config.monitors import SWITCHED
from parallel3d.config.normalise import apply_overrides
from tests.config.configs import REMOVED, error_of, raw
from tests.config.styles import FILES

pytestmark = pytest.mark.pure

MOE = {"family": "moe", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
KEYS = []
for section, keys in (BY_SECTION | GONE).items():
    KEYS += [(f"{section}.{name}".lstrip("."), key) for name, key in keys.items()]

# What Hugging Face's documentation shows for ZeRO-3, and what such files gather over time.
REAL_WORLD = json.loads(FILES["trainer_zero3"].read_text()) | {
    "fp16": {"enabled": "auto", "auto_cast": False, "loss_scale": 0, "loss_scale_window": 1000},
    "prescale_gradients": False,
    "zero_allow_untested_optimizer": True,
    "flops_profiler": {"enabled": False, "profile_step": 1},
    "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
    "data_types": {"grad_accum_dtype": "fp32"},
    "communication_data_type": None,
}


def placed(path, value):
    """The changes that put a value at a path; its section is there then."""
    changes = {path: value}
    if path.startswith("parallel3d.model."):
        changes = {"parallel3d.model": dict(MOE)} | changes
    if path.startswith("parallel3d.model.rope_scaling."):
        changes |= {"parallel3d.model.rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
        changes[path] = changes.pop(path)
    if path.startswith("scheduler."):
        changes = {"scheduler": {"type": "WarmupLR", "params": {}}, path: value}
    if path == "bfloat16":  # refused only beside its new name
        changes["bf16"] = {}
    return changes


@pytest.mark.parametrize(("path", "key"), KEYS, ids=[path for path, _ in KEYS])
def test_key_is_dropped_if_neutral_and_refused_otherwise(path, key):
    neutral = [*key.values]
    for item, values in key.items.items():
        neutral += [{item: value} for value in values]
    if key.switch:
        neutral += [{}, {key.switch: False}]
    *sections, name = path.split(".")
    for value in neutral:
        changes = placed(path, value)
        if sections and sections[0] in SWITCHED:
            changes[f"{sections[0]}.enabled"] = False  # required beside any key
        config = RunConfig.from_dict(raw(**changes))
        assert name not in reduce(getitem, sections, config.to_dict())
    if key.values == (ANY,):
        return
    refused = {key.switch: True} if key.switch else "?"
    message = error_of(**placed(path, refused))
    assert f"{path}.{key.switch} = true: " in message or f'{path} = "?": ' in message
    assert key.reason.partition("; ")[0] in message
    assert key.reason.partition("; ")[2] in message


# A block, and what its message must say. The first rows are the same slip in each kind of block.
SLIPS = [
    ("tensorboard", {"enable": True, "output_path": "x"}, 'enable = true: .*nearest .*"enabled"'),
    ("wandb", {"Enabled": True}, 'Enabled = true: .*nearest .*"enabled"'),
    ("fp16", {"enabeld": True}, 'enabeld = true: .*nearest .*"enabled"'),
    ("autotuning", {"enable": True, "fast": True}, 'enable = true: .*nearest .*"enabled"'),
    ("nebula", {"ENABLED": True}, 'ENABLED = true: .*nearest .*"enabled"'),
    ("compile", {"deep_compile": True}, 'deep_compile = true: .*nearest .*"deepcompile"'),
    # A switch that is missing beside other keys.
    ("csv_monitor", {"output_path": "x"}, "enabled: is missing beside output_path; write true or"),
    ("bf16", {"check_grad_overflow": False}, "check_grad_overflow = false: must be true"),
    ("fp16", {"loss_scale": 0}, "enabled: is missing beside loss_scale; write true or false"),
    ("amp", {"opt_level": "O1"}, "enabled: is missing beside opt_level; write false, or use bf16"),
    ("data_efficiency", {"seed": 1}, "enabled: is missing beside seed; write false"),
    # The other keys alone have no effect.
    ("comms_logger", {"verbose": True}, "enabled: must be true or false"),
    ("flops_profiler", {"detailed": False}, "enabled: must be true or false"),
    ("compile", {"disable": False, "backend": "inductor"}, "deepcompile: is missing .*train.comp"),
    ("zero_optimization.offload_optimizer", {"pin_memory": True}, "device: is missing .*cpu"),
    ("zero_optimization.offload_param", {"buffer_count": 6}, "device: is missing .*nvme"),
    # Keys of a block that is off.
    ("tensorboard", {"enabled": False, "outptu_path": "x"}, 'outptu_path .*"output_path"'),
    ("comet", {"enabled": False, "samples_log_interval": "x"}, "samples_log_interval .*integer"),
    ("flops_profiler", {"enabled": False, "profile_stpe": 1}, 'profile_stpe .*"profile_step"'),
    ("elasticity", {"enabled": False, "micro_batchsizes": [1]}, '.*"micro_batch_sizes"'),
    ("hybrid_engine", {"enabled": False, "rows": 1}, "rows = 1: is not a setting; remove it"),
    ("compile", {"deepcompile": False, "backend": "x"}, 'backend = "x": is not a setting'),
    # Values that are neither true nor false.
    ("torch_autocast", {"enabled": "auto"}, 'enabled = "auto": is not used'),
    ("eigenvalue", {"enabled": 0}, "enabled = 0: was removed"),
]


@pytest.mark.parametrize(("path", "block", "words"), SLIPS, ids=[slip[0] for slip in SLIPS])
def test_keys_of_a_block_are_checked_on_or_off(path, block, words):
    message = error_of(**{path: block})
    assert message.startswith("1 problem ") or path == "compile"
    assert re.search(rf"\n  {re.escape(path)}\.{words}", message), message


def test_block_that_is_off_by_default_in_deepspeed_may_be_empty():
    names = ("tensorboard", "wandb", "fp16", "bf16", "amp", "compile", "autotuning")
    off: dict[str, dict[str, object]] = {name: {} for name in names}
    assert RunConfig.from_dict(raw(**off)) == RunConfig.from_dict(raw())


def test_throughput_timer_is_on_by_default_as_in_deepspeed():
    """So its switch may be missing beside other keys."""
    timers = {"throughput": {"synchronized": False}}
    assert RunConfig.from_dict(raw(timers=timers)) == RunConfig.from_dict(raw())


def test_real_world_file_is_resolved():
    file = raw(**REAL_WORLD)
    config = RunConfig.from_dict(file).resolve(4)
    assert file["bf16"] == {"enabled": "auto"}  # the file itself is unchanged
    assert config.train_batch_size == 8 * 1 * 1
    assert (config.bf16.enabled, config.fp16.enabled) == (True, False)
    assert config.optimizer.params.betas == (0.9, 0.999)
    zero = config.zero_optimization
    assert (zero.stage, zero.reduce_bucket_size) == (3, 64 * 64)
    assert zero.stage3_prefetch_bucket_size == int(0.9 * 64 * 64)
    assert zero.stage3_param_persistence_threshold == 640
    assert config.scheduler.params.total_num_steps == 10
    assert config.scheduler.params.warmup_max_lr == config.optimizer.params.lr == 5e-5
    assert '"auto"' not in json.dumps(config.resolve(4).to_dict()["zero_optimization"])
    again = RunConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again.to_dict() == config.to_dict()


def test_notes_report_the_value_of_each_auto():
    notes = RunConfig.from_dict(raw(**REAL_WORLD)).resolve(4).notes
    assert any(note.startswith("bf16.enabled: auto = true (true unless fp16") for note in notes)
    assert len(notes) == 16
    # A rate for fine-tuning, where weights are random: the last line, so that it is seen.
    assert notes[-1].startswith("WARNING: optimizer.params.lr = 5e-05 is Hugging Face's default")
    written = raw(**REAL_WORLD)
    written["optimizer"]["params"]["lr"] = 3e-4
    assert not any("WARNING" in note for note in RunConfig.from_dict(written).notes)
    assert RunConfig.from_dict(raw()).notes == ()


@pytest.mark.parametrize(("fp16", "bf16"), [(False, True), ("auto", True), (True, False)], ids=str)
def test_auto_bf16_never_means_fp32(fp16, bf16):
    config = RunConfig.from_dict(raw(fp16={"enabled": fp16}, bf16={"enabled": "auto"}))
    assert config.bf16.enabled is bf16
    assert config.fp16.enabled is (fp16 is True)


def test_invalid_model_with_auto_sizes_gives_one_problem():
    message = error_of(
        **{"parallel3d.model.hidden_size": "64", "zero_optimization.reduce_bucket_size": "auto"}
    )
    assert message.startswith("1 problem ")


def test_underscore_keys_are_ignored_as_comments():
    """At every level of DeepSpeed's part; the parallel3d block stays strict."""
    file = raw(_comment="ours", **{"optimizer._why": {"a": 1}, "optimizer.params._lr": 5, "_x": []})
    file["zero_optimization"]["offload_optimizer"] = {"device": "none", "_note": "none yet"}
    assert RunConfig.from_dict(file) == RunConfig.from_dict(raw())
    assert file["_comment"] == "ours"  # the file itself is unchanged
    assert 'parallel3d._comment = "x": is not a setting' in error_of(**{"parallel3d._comment": "x"})


def test_missing_zero_optimization_is_stage_0():
    config = RunConfig.from_dict(raw(zero_optimization=REMOVED))
    assert config.zero_optimization.stage == 0
    # In a block that is there a missing stage is a slip.
    assert "zero_optimization.stage: is required" in error_of(zero_optimization={})


@pytest.mark.parametrize("name", ["FusedAdam", "fusedadam", "ADAM"])
def test_fused_adam_is_adam(name):
    assert RunConfig.from_dict(raw(**{"optimizer.type": name})).optimizer.type == "Adam"


def test_missing_optimizer_is_adamw_with_deepspeed_defaults():
    """Because many training scripts create the optimizer, so their files have none."""
    config = RunConfig.from_dict(raw(optimizer=REMOVED))
    assert config.optimizer.type == "AdamW" and config.optimizer.params.lr == 0.001
    (note,) = config.notes
    assert note.startswith("optimizer: not set; AdamW") and "learning rate 0.001" in note
    option = note.partition("set ")[2].split()[-2:]
    assert option[0] == "--optimizer.params.lr"
    file = raw(optimizer=REMOVED)
    apply_overrides(file, option)
    config = RunConfig.from_dict(file)
    assert config.optimizer.params.lr == float(option[1]) and config.notes == ()
    # In an optimizer that is there, a missing rate is a mistake.
    assert "optimizer.params: is required" in error_of(optimizer={"type": "Adam"})
    auto = {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}
    config = RunConfig.from_dict(raw(optimizer=REMOVED, scheduler=auto))
    assert config.scheduler.params.warmup_max_lr == 0.001


def test_message_of_a_missing_block_can_be_pasted():
    pasted = error_of(parallel3d=REMOVED).partition("add it: ")[2]
    RunConfig.from_dict(raw() | json.loads(f"{{{pasted}}}"))
    pasted = error_of(**{"optimizer.params": REMOVED}).partition("add it: ")[2]
    params = json.loads(f"{{{pasted}}}")
    assert RunConfig.from_dict(raw(optimizer=params)).optimizer.params.lr == 3e-4


def test_parameters_of_other_optimizers_are_refused_one_by_one():
    """Those of 1-bit Adam, 0/1 Adam and 1-bit LAMB, each with the optimizer that it belongs to."""
    keys = BY_SECTION["optimizer.params"]
    names = [name for name, key in keys.items() if "1-bit" in key.reason]
    assert {"freeze_step", "var_update_scaler", "factor_threshold"} <= {*names}
    params = {"lr": 1e-3} | dict.fromkeys(names, 1)
    message = error_of(optimizer={"type": "OneBitLamb", "params": params})
    assert message.startswith(f"{1 + len(names)} problems")
    for name in names:
        assert f"optimizer.params.{name} = 1: is for 1-bit optimizers, which are not" in message


def test_steps_per_print_accepts_null_and_large_numbers():
    checkpoints = {"number_checkpoints": 4}  # any number is accepted
    file = raw(steps_per_print=None, activation_checkpointing=checkpoints)
    assert RunConfig.from_dict(file) == RunConfig.from_dict(raw())
    assert RunConfig.from_dict(raw(steps_per_print=1e9)).steps_per_print == 10**9


def test_old_names_and_null_offload_are_accepted():
    assert RunConfig.from_dict(raw(bfloat16={"enabled": True})).bf16.enabled
    null = {"stage": 3, "offload_optimizer": None, "offload_param": None}
    config = RunConfig.from_dict(raw(zero_optimization=null)).zero_optimization
    assert (config.offload_optimizer.device, config.offload_param.device) == ("none", "none")


@pytest.mark.parametrize(
    ("batch", "micro", "accumulation", "expected"),
    [
        (None, 2, None, (6, 2, 1)),
        (None, 2, 4, (24, 2, 4)),
        (24, 2, None, (24, 2, 4)),
        (24, None, 4, (24, 2, 4)),
        (24, None, None, (24, 8, 1)),
        (24, 2, 4, (24, 2, 4)),
    ],
)
def test_missing_batch_sizes_are_derived(batch, micro, accumulation, expected):
    """As in DeepSpeed; here dp is 3."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = dict(zip(names, (batch, micro, accumulation), strict=True))
    config = RunConfig.from_dict(raw(**given)).resolve(12)
    assert tuple(getattr(config, name) for name in names) == expected
    assert config.global_batch_size == prod((3, config.micro_batch_size, config.num_microbatches))


def test_indivisible_batch_is_refused():
    config = RunConfig.from_dict(raw(train_batch_size=20, gradient_accumulation_steps=None))
    with pytest.raises(ConfigError, match=r"train_batch_size = 20: .*dp=3 = 6; use 18 or 24"):
        config.resolve(12)


def test_max_tokens_become_steps():
    # 24 samples of 128 tokens a step
    config = RunConfig.from_dict(raw(**{"parallel3d.train": {"max_tokens": 3 * 24 * 128 + 5}}))
    resolved = config.resolve(12)
    assert (resolved.train.steps, resolved.train.max_tokens) == (3, None)
    assert resolved.with_corpus(4096, 10**6).num_steps == 3
    assert config.resolve(4).train.steps == 9
    assert RunConfig.from_dict(resolved.to_dict()).to_dict() == resolved.to_dict()
    few = RunConfig.from_dict(raw(**{"parallel3d.train": {"max_tokens": 24 * 128 - 1}}))
    with pytest.raises(ConfigError, match=r"max_tokens = 3071: is less than one step of 3072"):
        few.resolve(12)


def test_epochs_become_steps():
    train = {"epochs": 2.5}
    config = RunConfig.from_dict(raw(**{"parallel3d.train": train})).resolve(12)
    assert config.train.steps is None
    # 49 samples of 128 tokens, the last of which needs one token more: 2.5 x 49 = 122 of 24 a step
    known = config.with_corpus(4096, 49 * 128 + 1)
    assert (known.train.steps, known.train.epochs, known.model.vocab_size) == (5, None, 4096)
    assert config.with_corpus(4096, 48 * 128 + 1).train.steps == 120 // 24
    assert config.with_corpus(4096, 48 * 128).train.steps == 117 // 24
    assert samples_of_epochs(0.29, 100, 29) == 29  # 0.29 * 100 is 28.999999999999996
    with pytest.raises(ConfigError, match=r"epochs = 2.5: is 22 samples .* one step of 24"):
        config.with_corpus(4096, 9 * 128 + 1)


@pytest.mark.parametrize(
    "train",
    [
        {"max_tokens": 3 * 24 * 128, "lr_schedule": {"type": "wsd", "decay_steps": 4}},
        {"epochs": 1, "lr_schedule": {"type": "wsd", "decay_steps": 4}},
        {"epochs": 1, "profile": {"start": 3}},
    ],
)
def test_steps_are_checked_once_they_are_known(train):
    config = RunConfig.from_dict(raw(**{"parallel3d.train": train}))
    with pytest.raises(ConfigError, match=r"3 steps; use"):
        config.resolve(12).with_corpus(4096, 72 * 128 + 1)
