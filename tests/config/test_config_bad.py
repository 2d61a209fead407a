"""Bad configs of every kind: the message names place, value, rule and remedy."""

import json

import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from tests.config.configs import LLAMA, REMOVED, error_of, raw

pytestmark = pytest.mark.pure

ZERO, ADAM, P3D = "zero_optimization", "optimizer.params", "parallel3d"
NAME = f"{P3D}.run.name"
STEPS, LR = f"{P3D}.train.steps", f"{P3D}.train.lr_schedule"
CYCLE = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_momentum": False}

# path, value, and what the message must say beside path and value: the rule and the remedy
BAD = [
    # types
    (STEPS, "100", "must be an integer", "without quotes"),
    (STEPS, 100.0, "must be an integer", "without quotes, point"),
    (STEPS, True, "must be an integer", "write a whole number"),
    ("parallel3d.run.tensorboard", "true", "must be true or false", "without quotes"),
    ("parallel3d.run.tensorboard", 1, "must be true or false", "write true or false"),
    ("optimizer.params.lr", "1e-3", "must be a number", "without quotes"),
    ("optimizer.params.betas", 0.9, "must be a list", "write [...]"),
    ("optimizer.params.betas", [0.9, 0.95, 0.99], "too many items", "exactly 2"),
    ("parallel3d.mesh", 8, "block of settings", "{...}"),
    ("parallel3d.model", 8, "block of settings", "{...}"),
    ("scheduler", "WarmupLR", "block of settings", "{...}"),
    ("zero_optimization", True, "block of settings", "{...}"),
    ("parallel3d.run.directory", 5, "must be a string", "double quotes"),
    ("parallel3d.mesh.tp", None, "must be an integer", "write a whole number"),
    # ranges
    ("optimizer.params.lr", 0.0, "greater than 0", "raise it"),
    ("optimizer.params.lr", float("nan"), "finite", "finite number"),
    ("optimizer.params.eps", 0.0, "greater than 0", "raise it"),
    ("optimizer.params.weight_decay", -0.1, "at least 0", "0 or more"),
    ("gradient_clipping", -1.0, "at least 0", "0 or more"),
    ("train_micro_batch_size_per_gpu", 0, "greater than 0", "raise it"),
    ("parallel3d.mesh.dp", 0, "greater than 0", '"auto"'),
    ("parallel3d.data.held_out_fraction", 0.5, "less than 0.5", "lower it"),
    ("parallel3d.data.vocab_size", 256, "at least 257", "257 or more"),
    ("parallel3d.model.resid_pdrop", 1.0, "less than 1", "lower it"),
    (f"{LR}.min_ratio", 1.5, "at most 1", "1 or less"),
    ("parallel3d.train.epochs", 0.0, "greater than 0", "raise it"),
    ("parallel3d.train.seed", 2**63, "less than", "lower it"),
    (NAME, "a/b", "plain name", "without /"),
    (NAME, "a\\b", "plain name", "without /"),
    (NAME, "", "plain name", "write it without"),
    (NAME, "  ", "plain name", "write it without"),
    (NAME, "..", "no folder of its own", "run-1"),
    (NAME, ".", "no folder of its own", "run-1"),
    (NAME, "-rf", "begins as an option", "letter or a digit"),
    (NAME, "first.lock", "ends as the lock of another run", "leave the ending out"),
    (NAME, "--run", "begins as an option", "letter or a digit"),
    (NAME, "a\nb", "invisible character U+000A", "write it without"),
    (NAME, "a\tb", "invisible character U+0009", "write it without"),
    (NAME, "a\0b", "invisible character U+0000", "write it without"),
    (NAME, "a\u202eb", "invisible character U+202E", "write it without"),
    (NAME, "a\u2028b", "invisible character U+2028", "write it without"),
    (NAME, "a\ud800b", "invisible character U+D800", "write it without"),
    (NAME, "x" * 101, "101 characters", "at most 100"),
    (NAME, "模" * 100, "300 bytes", "200 bytes"),
    (NAME, 7, "must be a string", "double quotes"),
    ("zero_optimization.reduce_bucket_size", 0.5, "must be an integer", "without quotes, point"),
    # unknown keys
    ("zero_optimisation", {"stage": 3}, "no setting", 'nearest one is "zero_optimization"'),
    ("parallel3d.mesh.pipeline", 2, "no setting", "did you mean|this block has: pp, dp, tp"),
    ("parallel3d.model.hiden_size", 64, "no setting", '"hidden_size"'),
    ("zero_optimization.stage3_max_live_parameter", 0, "no setting", "_max_live_parameters"),
    ("steps", 100, "no setting here", "did you mean parallel3d.train.steps"),
    # what a name may be
    ("zero_optimization.stage", 4, "must be 0, 1, 2 or 3", "write 0, 1, 2 or 3"),
    ("zero_optimization.stage", True, "must be 0, 1, 2 or 3", "write a whole number"),
    ("zero_optimization.stage", "3", "must be 0, 1, 2 or 3", "write a whole number"),
    ("optimizer.type", "Lion", "not yet supported", '"AdamW"'),
    ("optimizer.type", "SGD", 'must be "AdamW" or "Adam"', 'write "AdamW"'),
    ("parallel3d.mesh", "best", "block of settings", "{...}"),
    ("parallel3d.plan.fix", ["offload"], 'with mesh "plan" only', "remove it"),
    ("parallel3d.pipeline.schedule", "zigzag", "names no file", "one_f_one_b"),
    ("parallel3d.pipeline.activation_checkpointing", "half", "must be", '"selective" or "full"'),
    ("parallel3d.model.family", "bert", "no model family", "gpt"),
    ("parallel3d.run.hardware", "abacus", "not described", "H100-SXM5-80GB"),
    ("parallel3d.checkpoint.keep", 1, "at least 2", "write 2 or more"),
    ("parallel3d.checkpoint.resume", True, "no place to resume from", "a step, or a path"),
    ("scheduler.type", "Cosine", "names no scheduler", "WarmupCosineLR"),
    (f"{ZERO}.offload_optimizer", {"device": "disk"}, "must be", '"none", "cpu" or "nvme"'),
    # DeepSpeed's keys that parallel3d refuses by name
    ("zero_optimization.zero_quantized_weights", True, "ZeRO++", "remove it"),
    ("zero_optimization.zero_hpz_partition_size", 8, "ZeRO++", "remove it"),
    ("zero_optimization.mics_shard_size", 8, "removed from DeepSpeed", "remove it"),
    ("zero_optimization.round_robin_gradients", True, "wrong places", "remove it"),
    ("zero_optimization.cpu_offload", "yes", "is deprecated", '"offload_optimizer"'),
    (f"{ZERO}.offload_optimizer.ratio", 0.5, "all of the optimizer's state", "remove it"),
    ("bf16.bf16_optimizer_states", True, "moments are fp32", "remove it"),
    ("parallel3d.train.check_layers", False, "was removed", "parallel3d verify"),
    ("amp", {"enabled": True}, "removed from DeepSpeed", "use bf16"),
    ("activation_checkpointing", {"cpu_checkpointing": True}, "stay on the device", "remove it"),
    ("activation_checkpointing", {"partition_activations": True}, "not cut", "sequence_parallel"),
    ("communication_data_type", "bf16", "would round gradients", "bf16.enabled = true"),
    ("communication_data_type", "fp16", "fp32", "bf16"),
    ("data_types", {"grad_accum_dtype": "bf16"}, "must be fp32", "remove it"),
    ("prescale_gradients", True, "reduces the gradients itself", "remove it"),
    ("prescale_gradients", 0, "reduces the gradients itself", "remove it"),  # no JSON false
    ("optimizer.params.amsgrad", True, "not supported", "remove it"),
    ("optimizer.params.max_grad_norm", 1.0, "is not used", "gradient_clipping"),
    ("optimizer.params.adam_w_mode", False, "decoupled", "remove it"),
    ("zero_optimization.stage", "auto", "must be 0, 1, 2 or 3", "write a whole number"),
    ("steps_per_print", "auto", "cannot be auto", "auto may be: train_micro_batch_size_per_gpu"),
    # between settings
    ("parallel3d.mesh.tp", 3, "divide num_attention_heads=16", "use tp = 1, 2, 4, 8 or 16"),
    ("parallel3d.model.intermediate_size", 255, "not a multiple of tp=2", "use 256"),
    ("parallel3d.mesh.pp", 7, "6 layers", "pp = 6 or less"),
    ("parallel3d.model.num_attention_heads", 6, "divide hidden_size=64", "use 4 heads"),
    ("parallel3d.model.vocab_size", 1000, "tokenizer's 4096 tokens", 'use 4096 or more, or "auto"'),
    ("parallel3d.data.sequence_length", 2048, "max_position_embeddings=1024", "at most 1024"),
    ("parallel3d.data.paths", ["a.txt"], "not read by source", "remove it"),
    ("train_batch_size", 9, "dp=1 = 8", 'use 8 or "auto"'),
    (f"{ZERO}.offload_optimizer.device", "nvme", "has no nvme_path", '"/local/nvme"'),
    (f"{ZERO}.offload_param.device", "cpu", "stage is 1", "use stage 3"),
    (f"{LR}.decay_steps", 5, 'not read by type "constant"', 'use type "wsd"'),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "rule", "remedy"), BAD)
def test_bad_value_is_named_with_rule_and_remedy(path, value, rule, remedy):
    # dp is given so that the batch is checked, too.
    message = error_of(**{"parallel3d.mesh.dp": 1, path: value})
    check(message, path, value, rule, remedy)


def check(message, path, value, rule, remedy):
    inner = next(iter(value)) if isinstance(value, dict) and value else None
    leaf = value[inner] if f"{path}.{inner} = " in message else value
    line = next(line for line in message.splitlines()[1:] if path in line)
    shown = json.dumps(leaf)
    assert f" = {shown if len(shown) <= 80 else f'{shown[:76]} ...'}: " in line
    assert rule in line
    assert any(choice in line for choice in remedy.split("|"))


# what is changed; then path and value of the problem, its rule and remedy
BAD_TOGETHER = [
    (
        {f"{P3D}.train.compile": "block", f"{ZERO}.stage": 3},
        f"{P3D}.train.compile",
        "block",
        "needs each block's weights, which ZeRO-3 gathers while it runs",
        f'use "pointwise", or {ZERO}.stage = 2',
    ),
    (
        {f"{P3D}.train.compile": "block", f"{P3D}.pipeline.schedule": "zero_bubble"},
        f"{P3D}.train.compile",
        "block",
        "cannot make weight gradients apart, as schedule 'zero_bubble' does",
        'use "pointwise", or another schedule',
    ),
    (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        "fp16.enabled", True, "bf16.enabled too", "switch one of them off",
    ),
    (
        {"parallel3d.train": {"steps": 10, "max_tokens": 10_000}},
        "parallel3d.train", {"steps": 10, "max_tokens": 10_000}, "one thing too many",
        "exactly one of steps, max_tokens, epochs",
    ),
    ({"parallel3d.train": {}}, "parallel3d.train", {}, "says not how long", "exactly one of"),
    (
        {LR: {"type": "wsd", "warmup_steps": 4, "decay_steps": 7}},
        f"{LR}.decay_steps", 7, "warmup_steps=4 are longer than the run", "use at most 6",
    ),
    (
        {"parallel3d.train.profile": {"start": 8, "steps": 3}},
        "parallel3d.train.profile", {"start": 8, "steps": 3}, "end at step 11", "steps = 2 or less",
    ),
    (
        {"parallel3d.train.profile": {"start": 10}},
        "parallel3d.train.profile", {"start": 10, "steps": 1}, "the run's 10 steps",
        "start = 9 or less",
    ),
    (
        {"scheduler": {"type": "WarmupLR"}, LR: {"type": "cosine"}},
        "scheduler", "WarmupLR", "both set the learning rate", "remove one of them",
    ),
    (
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10}}},
        "scheduler.params.total_num_steps", 10, "less than warmup_num_steps=1000",
        "use 1000 or more",
    ),
    (
        {"scheduler": {"type": "OneCycle", "params": CYCLE | {"cycle_momentum": True}}},
        "scheduler.params.cycle_momentum", True, "must be false", "write false",
    ),
    (
        {"scheduler": {"type": "OneCycle", "params": CYCLE | {"cycle_min_mom": 0.7}}},
        "scheduler.params.cycle_min_mom", 0.7, "betas are constant", "remove it",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": [0, 0]}}},
        "scheduler.params.warmup_min_lr", [0, 0], "must be a number", "without quotes",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max": 1}}},
        "scheduler.params.warmup_max", 1, "no setting", '"warmup_max_lr"',
    ),
    (
        {"parallel3d.mesh": {"tp": 4}, "parallel3d.model": LLAMA},
        "parallel3d.mesh.tp", 4, "neither divides num_key_value_heads=6", "1, 2, 3, 6 or 12",
    ),
    (
        {"parallel3d.mesh": {"tp": 2, "sequence_parallel": True},
         "parallel3d.data.sequence_length": 127},
        "parallel3d.data.sequence_length", 127, "not a multiple of tp=2", "use 128",
    ),
    (
        {"parallel3d.pipeline": {"stages_per_rank": 2}},
        "parallel3d.pipeline.schedule", "gpipe", "cannot run with pp=2, microbatches=4",
        "'interleaved'",
    ),
    (
        {"parallel3d.pipeline": {"schedule": "interleaved", "stages_per_rank": 4}},
        "parallel3d.pipeline.stages_per_rank", 4, "8 stages on pp=2 ranks", "use 3 or less",
    ),
    (
        {"bf16": {"enabled": True}, "bfloat16": {"enabled": True}},
        "bfloat16", {"enabled": True}, "old name", 'use "bf16"|remove it',
    ),
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer":
                               {"device": "nvme", "nvme_path": "/x"}}},
        f"{ZERO}.offload_optimizer.device", "nvme", "needs stage 3", 'device "cpu"',
    ),
    (
        {"optimizer.params.torch_adam": True, f"{ZERO}.offload_optimizer": {"device": "cpu"}},
        "optimizer.params.torch_adam", True, "does not go with offload", "remove one of them",
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer":
                               {"device": "nvme", "nvme_path": "/x", "pipeline_read": True}}},
        f"{ZERO}.offload_optimizer.buffer_count", 4, "too few", "use 8 or more",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "path", "value", "rule", "remedy"), BAD_TOGETHER)
def test_settings_that_do_not_go_together(changes, path, value, rule, remedy):
    check(error_of(**changes), path, value, rule, remedy)


def test_kinds():
    """The kinds are told apart by place and rule."""
    kinds = {(path, rule) for path, _, rule, _ in BAD}
    kinds |= {(path, rule) for _, path, _, rule, _ in BAD_TOGETHER}
    assert len(kinds) >= 90


@pytest.mark.parametrize(
    "path",
    [
        "train_micro_batch_size_per_gpu",
        "optimizer",
        "optimizer.params.lr",
        "zero_optimization.stage",
        "parallel3d",
        "parallel3d.model.hidden_size",
    ],
)
def test_missing_setting(path):
    assert f"{path}: is required; add it: " in error_of(**{path: REMOVED})


def test_a_mesh_that_is_planned_wants_the_batch_that_it_is_planned_for():
    planned = {"parallel3d.mesh": "plan"}
    said = error_of(**planned)
    assert 'train_batch_size: is required with mesh "plan"' in said
    kept = {"parallel3d.plan": {"fix": ["micro_batch"]}, "train_batch_size": 8}
    said = error_of(**planned, **kept, train_micro_batch_size_per_gpu=REMOVED)
    assert "train_micro_batch_size_per_gpu: is required, as parallel3d.plan.fix" in said
    said = error_of(**planned, **{"parallel3d.plan": {"fix": ["tp"]}})
    assert 'parallel3d.plan.fix.0 = "tp": must be "zero_stage", "offload"' in said
    config = RunConfig.from_dict(raw(**planned, train_batch_size=8))
    assert config.is_planned and RunConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match=r'mesh = "plan": there is no mesh yet; write the one'):
        config.resolve(4)


def test_the_base_of_all_these_is_valid():
    """Otherwise each of them would fail for the same reason."""
    RunConfig.from_dict(raw(**{"parallel3d.mesh.dp": 1}))
    llama = {"parallel3d.mesh": {"tp": 12}, "parallel3d.model": LLAMA}
    assert RunConfig.from_dict(raw(**llama)).mesh.tp == 12
