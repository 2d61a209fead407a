"""Bad configs of every kind: one line for each problem, with its place, value, rule and remedy.

Each row is a kind of its own: a wording, a rule, a place that is suggested. Every key of DeepSpeed
that is refused by name is in test_config_deepspeed.py.
"""

import json

import pytest

from launch import plan
from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig
from tests.config.configs import LLAMA, REMOVED, error_of, raw

pytestmark = pytest.mark.pure

ZERO = "zero_optimization"
ADAM = "optimizer.params"
P3D = "parallel3d"
RECOMPUTE = f"{P3D}.pipeline.activation_checkpointing"
NAME = f"{P3D}.run.name"
STEPS = f"{P3D}.train.steps"
TRACKERS = f"{P3D}.run.trackers"
LR = f"{P3D}.train.lr_schedule"
AC = "activation_checkpointing"
ON = {"enabled": True}
IDS_ALONE = {"source": "tokens", "paths": ["a.npy"], "sequence_length": 128}
IDS_ALONE |= {"tokenizer": "none", "vocab_size": 300, "end_of_text_id": 0}
BALANCED = {"sequence_length": 128, "isolate_documents": True, "balance_microbatches": True}
PASTE = '"params": {"lr": 0.0003, "betas": [0.9, 0.95], "weight_decay": 0.1}'

NO_NAMES = [
    "a\\b",
    "a/b",
    "",
    "  ",
    "..",
    "-rf",
    "a.lock",
    "a\u202eb",
    "a\ud800b",
    "x" * 101,
    "模" * 100,
]
# path, value, and what the message must say beside path and value: the rule and the remedy
BAD = [
    (f"{P3D}.data.tokenizer", None, "must be a string", 'leave it out, which means "train"'),
    (f"{P3D}.train.seed", None, "must be an integer", "leave it out, which means 0"),
    # types
    (STEPS, "many", "must be an integer", "write a whole number"),
    (STEPS, "1.5", "must be an integer", "write a whole number"),
    (STEPS, "10B tokens", "must be an integer", "write a whole number"),
    (f"{P3D}.mesh.tp", "2", "must be an integer", "without quotes"),
    (f"{P3D}.mesh.tp", 2.0, "must be an integer", "without quotes, point"),
    (STEPS, True, "must be an integer", "write a whole number"),
    ("tensorboard.enabled", "true", "must be true or false", "without quotes"),
    (f"{P3D}.run.directory", "s3://bucket/runs", "is a URL, and only", "name a folder"),
    (f"{P3D}.run.directory", "a" * 300, "is longer than file systems allow", "shorter path"),
    (f"{P3D}.data.cache", "a/" * 3000, "is longer than file systems allow", "shorter path"),
    ("bf16", True, "must be a block of settings", 'write {"enabled": true}'),
    ("fp16", {"enabled": True, "loss_scale": 1e30}, "at most 4294967296", "4294967296 or less"),
    ("fp16", {"enabled": True, "min_loss_scale": 1e6}, "first scale, 2^16 = 65536", "65536 or le"),
    (f"{ZERO}.offload_optimizer", "cpu", "block of settings", 'write {"device": "cpu"}'),
    (f"{ZERO}.offload_param", True, "must be a block of settings", 'write {"device": ...}'),
    (f"{P3D}.train.lr_schedule", "cosine", "block of settings", 'write {"type": "cosine"}'),
    (f"{P3D}.model", "a/model", "must be a block of settings", 'write {"family": ...}'),
    (f"{P3D}.mesh", "2x2x2", "must be a block of settings", 'write {"pp": ...}, or "plan"'),
    ("scheduler", ["WarmupLR"], "must be a block of settings", 'write {"type": ...}'),
    (f"{P3D}.train.timeout_seconds", 1e300, "must be at most 1000000000", "or less"),
    ("optimizer.params.lr", "1e-3", "must be a number", "without quotes"),
    ("optimizer.params.betas", 0.9, "must be a list", "write [...]"),
    ("optimizer.params.betas", [0.9, 0.95, 0.99], "too many items", "exactly 2"),
    ("tensorboard", True, "block of settings", '{"enabled": true}'),
    (f"{P3D}.mesh", 8, "block of settings", '{"pp": ...}'),
    (f"{P3D}.model", 8, "block of settings", '{"family": ...}'),
    ("scheduler", "WarmupLR", "block of settings", 'write {"type": "WarmupLR"}'),
    ("zero_optimization", None, "block of settings", '{"stage": ...}'),
    ("optimizer", None, "block of settings", PASTE),
    (f"{P3D}.run.directory", 5, "must be a string", "double quotes"),
    (f"{P3D}.mesh.tp", None, "must be an integer", "write a whole number"),
    (TRACKERS, "wandb", "must be a list", "[...]"),
    # lists and blocks in place of one of several types
    (f"{P3D}.data.source", [[]], "must be", '"python-stdlib"'),
    (f"{P3D}.model.vocab_size", [], "must be an integer", '"auto"'),
    (f"{P3D}.model.vocab_size", ["auto"], "must be an integer", '"auto"'),
    (f"{P3D}.model.vocab_size", {}, "must be an integer", '"auto"'),
    (f"{P3D}.model.from_pretrained", [1, 2, 3], "must be", "write"),
    (f"{P3D}.mesh.dp", [], "must be an integer", 'write "auto"'),
    # ranges
    ("optimizer.params.lr", 0.0, "greater than 0", "raise it"),
    ("optimizer.params.lr", float("nan"), "finite", "finite number"),
    ("gradient_clipping", -1.0, "at least 0", "0 or more"),
    (f"{P3D}.mesh.dp", 0, "greater than 0", '"auto"'),
    (f"{P3D}.data.held_out_fraction", 0.5, "less than 0.5", "lower it"),
    (f"{P3D}.data.vocab_size", 256, "at least 257", "257 or more"),
    (f"{LR}.min_ratio", 1.5, "at most 1", "1 or less"),
    (f"{P3D}.train.seed", 2**63, "less than", "lower it"),
    (f"{ZERO}.reduce_bucket_size", 0.5, "must be an integer", "write a whole number"),
    # names
    *((NAME, name, "must be a plain name", "as in run-1") for name in NO_NAMES),
    ("csv_monitor", ON | {"output_path": "a\0b"}, "U+0000", "remove it"),
    # unknown keys
    ("zero_optimisation", {"stage": 3}, "not a setting", 'nearest one is "zero_optimization"'),
    (f"{P3D}.mesh.tp_size", 2, "not a setting", "this block has: pp, dp, cp, tp"),
    (f"{P3D}.model.hiden_size", 64, "not a setting", '"hidden_size"'),
    (f"{P3D}._why", "x", "not a setting", "mesh, plan, pipeline"),
    ("steps", 100, "not a setting here", "did you mean parallel3d.train.steps?"),
    ("lr", 0.001, "not a setting here", "did you mean optimizer.params.lr?"),
    ("mesh", {"pp": 2}, "not a setting here", "did you mean parallel3d.mesh?"),
    ("mseh", {"pp": 2}, "not a setting here", "did you mean parallel3d.mesh?"),
    (f"{P3D}.train_batch_size", 8, "not a setting here", "did you mean train_batch_size?"),
    (f"{P3D}.model", LLAMA | {"embd_pdrop": 0.1}, 'only a setting of family "gpt"', "has: from_"),
    (f"{P3D}.model.rope_theta", 10000.0, 'only a setting of family "llama"', "this block has"),
    ("scheduler", {"type": "WarmupLR", "params": {"cos_min_ratio": 1}}, 'of type "WarmupC', "has"),
    # names of Hugging Face's Trainer and of Megatron-LM
    ("per_device_train_batch_size", 8, "another program", "set train_micro_batch_size_per_gpu"),
    ("micro_batch_size", 8, "another program's name", "set train_micro_batch_size_per_gpu"),
    (f"{P3D}.train.max_steps", 8, "another program's name", f"set {STEPS}"),
    (f"{P3D}.train.learning-rate", 1e-3, "another program's name", "set optimizer.params.lr"),
    (f"{P3D}.model.num_layers", 4, "another program's name", "model.num_hidden_layers"),
    ("seq_length", 4, "another program's name", "set parallel3d.data.sequence_length"),
    ("sequence-parallel", True, "not a setting here", "did you mean parallel3d.mesh.sequence_p"),
    ("rope-scaling-factor", 8, "another program's name", "set parallel3d.model.rope_scaling"),
    ("precision", "bfloat16", "another program's name", "set bf16.enabled"),
    ("callbacks", [], "is not a setting", "this block has: "),
    ("eval_accumulation_step", 3, "is not a setting", "this block has: "),
    ("moe", True, "another program's name", 'family = "moe", and parallel3d.mesh.ep'),
    # choices
    (f"{ZERO}.stage", 4, "must be 0, 1, 2 or 3", "write 0, 1, 2 or 3"),
    (f"{ZERO}.stage", True, "must be 0, 1, 2 or 3", "write 0, 1, 2 or 3"),
    (f"{ZERO}.stage", "auto", "must be 0, 1, 2 or 3", "write 0, 1, 2 or 3"),
    ("steps_per_print", "auto", "must be an integer", "write a whole number"),
    ("optimizer.type", "Lion", 'must be "AdamW" or "Adam"', 'write "AdamW"'),
    ("optimizer.type", "SGD", 'must be "AdamW" or "Adam"', 'write "AdamW"'),
    (f"{P3D}.mesh", "best", "block of settings", 'or "plan"'),
    (f"{P3D}.pipeline.schedule", "zigzag", "is not a schedule", "one_f_one_b"),
    (f"{P3D}.model.family", "bert", "not a known model family", "gpt"),
    (RECOMPUTE, "sometimes", "no kind of recomputation", 'a list of layernorm, core_attn'),
    (RECOMPUTE, {"full": 0}, "no kind of recomputation", '{"full": K}'),
    (RECOMPUTE, ["mlp", "qkv"], "no kind of recomputation", "core_attn, mlp_act, mlp"),
    (f"{P3D}.run.hardware", "abacus", "not described", "H100-SXM5-80GB"),
    (f"{P3D}.checkpoint.resume", True, 'must be "auto", "none", a step', "one of these"),
    ("scheduler.type", "Cosine", "is not a known scheduler", "WarmupCosineLR"),
    (f"{TRACKERS}", ["tensorbord"], "must be", 'write "tensorboard", "csv", "wandb", "comet"'),
    # refused by name
    (f"{P3D}.train.check_layers", False, "was removed", "parallel3d verify"),
    (f"{P3D}.mesh.cp_ring", True, "was removed", "remove it"),
    (f"{P3D}.model.post_norm", True, "was removed", 'such as "olmo2"'),
    (f"{P3D}.pipeline.scatter_activations", True, "was removed", "mesh.sequence_parallel"),
    (AC, {"partition_activations": True}, "not partitioned over tp", "sequence_parallel"),
    (AC, {"granularity": "full"}, "is not used", "set parallel3d.pipeline"),
    ("communication_data_type", "fp16", "fp32", "bf16"),
    ("prescale_gradients", 0, "must be true or false", "remove it"),  # no JSON false
    # between settings
    (f"{P3D}.plan.fix", ["offload"], 'for mesh "plan" only', "remove it"),
    ("communication_data_type", "bf16", "would round gradients", "bf16.enabled = true"),
    (f"{P3D}.mesh.tp", 3, "divide num_attention_heads=16", "use tp = 1, 2, 4, 8 or 16"),
    (f"{P3D}.model.intermediate_size", 255, "not a multiple of tp=2", "use 256"),
    (f"{P3D}.mesh.pp", 7, "6 layers", "at most 6 stages"),
    (f"{P3D}.model.num_attention_heads", 6, "divide hidden_size=64", "use 4 heads"),
    (f"{P3D}.model.vocab_size", 1000, "tokenizer's 4096 tokens", 'use 4096 or more, or "auto"'),
    (f"{P3D}.data.sequence_length", 2048, "max_position_embeddings=1024", "at most 1024"),
    (f"{P3D}.data.paths", ["a.txt"], "not read by source", "remove it"),
    ("train_batch_size", 9, "dp=1 = 8", 'use 8 or "auto"'),
    (f"{ZERO}.offload_param.device", "cpu", "stage is 1", "use stage 3"),
    (f"{LR}.decay_steps", 5, 'not read by type "constant"', 'use type "wsd"'),
]  # fmt: skip
NVME = {"device": "nvme", "nvme_path": "/x"}
AHEAD = {"pipeline_read": True, "pipeline_write": True}
# what is changed; path and value of the problem; its rule and remedy
MOE = {"family": "moe", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
BAD_TOGETHER = [
    ({f"{P3D}.train.compile": "block", f"{ZERO}.stage": 3},
     f"{P3D}.train.compile", "block", "each block's weights", f"or {ZERO}.stage = 2"),
    ({f"{P3D}.train.compile": "block", f"{P3D}.pipeline.schedule": "zero_bubble"},
     f"{P3D}.train.compile", "block", "cannot split the backward", "or another schedule"),
    ({f"{P3D}.train.on_spike": "rewind", f"{P3D}.checkpoint.every": 0},
     f"{P3D}.train.on_spike", "rewind", "checkpoint.every is 0", 'or use "skip"'),
    ({"fp16": ON, "bf16": ON}, "fp16.enabled", True, "with bf16.enabled", "disable one of them"),
    ({"bf16": ON, "bfloat16": ON}, "bfloat16", ON, "old name", "remove it"),
    ({f"{P3D}.train": {"steps": 10, "max_tokens": 10_000}},
     f"{P3D}.train", {"steps": 10, "max_tokens": 10_000}, "sets both steps and", "exactly one of"),
    ({f"{P3D}.train": {}}, f"{P3D}.train", {}, "does not set the run's length", "exactly one of"),
    ({LR: {"type": "wsd", "warmup_steps": 4, "decay_steps": 7}},
     f"{LR}.decay_steps", 7, "warmup_steps=4 exceeds the run's 10", "use at most 6"),
    ({LR: {"type": "wsd", "warmup_steps": 20, "decay_steps": 12}},
     f"{LR}.decay_steps", 12, "exceeds the run's 10 steps", "add up to at most 10"),
    ({f"{P3D}.train.profile": {"start": 8, "steps": 3}},
     f"{P3D}.train.profile", {"start": 8, "steps": 3}, "ends at step 11", "steps = 2 or less"),
    ({f"{P3D}.train.profile": {"start": 1, "ranks": [0, 8]}, f"{P3D}.mesh.dp": 2},
     f"{P3D}.train.profile.ranks", [0, 8], "names rank 8, and the mesh has", "use ranks from 0 to"),
    ({f"{P3D}.train.profile": {"start": 10}},
     f"{P3D}.train.profile", {"start": 10, "steps": 1}, "the run's 10 steps", "start = 9 or less"),
    ({"scheduler": {"type": "WarmupLR"}, LR: {"type": "cosine"}},
     "scheduler", "WarmupLR", "both set the learning rate", "remove one of them"),
    ({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10}}},
     "scheduler.params.total_num_steps", 10, "than warmup_num_steps=1000", "use 1000 or more"),
    ({"scheduler": {"type": "OneCycle", "params": {}}},
     "scheduler.type", "OneCycle", "not a known scheduler", "WarmupDecayLR"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": [0, 0]}}},
     "scheduler.params.warmup_min_lr", [0, 0], "must be a number", "without quotes"),
    ({f"{P3D}.mesh": {"tp": 4}, f"{P3D}.model": LLAMA},
     f"{P3D}.mesh.tp", 4, "neither divides num_key_value_heads=6", "1, 2, 3, 6 or 12"),
    ({f"{P3D}.mesh": {"tp": 2, "sequence_parallel": True}, f"{P3D}.data.sequence_length": 127},
     f"{P3D}.data.sequence_length", 127, "not a multiple of tp=2", "use 126 or 128"),
    ({f"{P3D}.mesh.cp": 3, f"{P3D}.data.sequence_length": 128},
     f"{P3D}.data.sequence_length", 128, "to cp=3 ranks in blocks of 8", "use 120 or 144"),
    ({f"{P3D}.mesh": {"cp": 16, "tp": 4, "sequence_parallel": True},
      f"{P3D}.data.sequence_length": 32},
     f"{P3D}.mesh.cp", 16, "leaves 2 tokens a rank, not a multiple of tp=4", "= false"),
    ({f"{P3D}.mesh.ep": 2},
     f"{P3D}.mesh.ep", 2, 'divides experts, and model.family="gpt" has none', "use 1"),
    ({f"{P3D}.mesh": {"dp": 4, "ep": 3}, f"{P3D}.model": MOE | {"num_experts": 6}},
     f"{P3D}.mesh.ep", 3, "does not divide num_experts=6 and mesh.dp=4", "use 1 or 2"),
    ({f"{P3D}.mesh": {"dp": 12, "dp_shards": 5}},
     f"{P3D}.mesh.dp_shards", 5, "does not divide mesh.dp=12", "use 1, 2, 3, 4, 6 or 12"),
    ({f"{P3D}.mesh": {"dp": 12, "ep": 2, "dp_shards": 5}, f"{P3D}.model": MOE},
     f"{P3D}.mesh.dp_shards", 5, "dp=12 and is not a multiple of mesh.ep=2", "use 2, 4, 6 or 12"),
    ({f"{P3D}.mesh": {"ep": 2, "dp_shards": 3}, f"{P3D}.model": MOE},
     f"{P3D}.mesh.dp_shards", 3, "is not a multiple of mesh.ep=2", "use 4"),
    ({f"{P3D}.mesh": {"dp_shards": "node"}, "zero_optimization": {"stage": 0}},
     f"{P3D}.mesh.dp_shards", "node", "zero_optimization.stage is 0", "use stage 1, 2 or 3, or"),
    ({f"{P3D}.mesh": {"dp_shards": "host"}},
     f"{P3D}.mesh.dp_shards", "host", 'must be "node"', "write"),
    ({f"{P3D}.mesh.dp_shards": 0},
     f"{P3D}.mesh.dp_shards", 0, "must be greater than 0", "raise it"),
    ({f"{P3D}.mesh.dp_shards": 2,
      "zero_optimization": {"stage": 2, "contiguous_gradients": False}},
     "zero_optimization.contiguous_gradients", False, "a buffer of gradients", "or dp_shards = nu"),
    ({f"{P3D}.mesh": {"pp": 2},
      f"{P3D}.model": MOE | {"router_aux_loss": "pooled", "router_aux_loss_coef": 0.1}},
     f"{P3D}.model.router_aux_loss", "pooled", "of all layers, which are in 2 stages", "pp = 1"),
    ({f"{P3D}.mesh": {"pp": 1},
      f"{P3D}.pipeline": {"schedule": "interleaved", "stages_per_rank": 3},
      f"{P3D}.model": MOE | {"router_aux_loss": "pooled", "router_aux_loss_coef": 0.1}},
     f"{P3D}.model.router_aux_loss", "pooled", "of all layers, which are in 3 stages", "pp = 1"),
    ({f"{P3D}.mesh": {"pp": 1}, f"{P3D}.model": MOE | {"router_aux_loss": "pooled"},
      f"{P3D}.train.check_bits": {"recompute_every": 9}},
     f"{P3D}.train.check_bits.recompute_every", 9, 'router_aux_loss is "pooled"', "use 0"),
    ({f"{P3D}.mesh": {"ep": 4}, f"{P3D}.model": MOE | {"num_experts": 6}},
     f"{P3D}.mesh.ep", 4, "does not divide num_experts=6", "use 1, 2, 3 or 6"),
    ({f"{P3D}.mesh": {"dp": 2, "ep": 2}, f"{P3D}.model": MOE,
      f"{P3D}.train.noise_scale_every": 5},
     f"{P3D}.train.noise_scale_every", 5, "needs each rank's own gradient", "mesh.ep = 1"),
    ({f"{P3D}.mesh.cp": 2, f"{P3D}.model.attn_pdrop": 0.1},
     f"{P3D}.model.attn_pdrop", 0.1, "whole samples, which cp=2 ranks share", "or mesh.cp = 1"),
    ({f"{P3D}.mesh.cp": 2, f"{P3D}.model": MOE | {"capacity_factor": 1.25}},
     f"{P3D}.model.capacity_factor", 1.25, "the last tokens of whole samples", "use null, or mesh"),
    ({f"{P3D}.train.evaluate_tasks.every": 5},
     f"{P3D}.train.evaluate_tasks.tasks", [], "is empty", "name tasks, such as"),
    ({f"{P3D}.data": IDS_ALONE, f"{P3D}.train.evaluate_tasks.tasks": ["mine.yaml"]},
     f"{P3D}.train.evaluate_tasks.tasks", ["mine.yaml"], "need a tokenizer", "remove it, or"),
    ({f"{P3D}.data.balance_microbatches": True},
     f"{P3D}.data.balance_microbatches", True, "needs isolate_documents", "isolate_documents ="),
    ({f"{P3D}.data": BALANCED, f"{P3D}.train.noise_scale_every": 5, f"{P3D}.mesh.dp": 2},
     f"{P3D}.train.noise_scale_every", 5, "ranks with random samples", "= false, or 0 here"),
    ({f"{P3D}.pipeline": {"stages_per_rank": 2}},
     f"{P3D}.pipeline.schedule", "gpipe", "with pp=2, microbatches=4", "'interleaved'"),
    ({f"{P3D}.pipeline": {"schedule": "interleaved", "stages_per_rank": 4}},
     f"{P3D}.mesh.pp", 2, "makes 8 stages with pipeline.stages_per_rank=4", "at most 6 stages"),
    ({ZERO: {"stage": 3, "offload_param": {"device": "nvme"}}},
     f"{ZERO}.offload_param.device", "nvme", "requires nvme_path", '"/local/nvme"'),
    ({ZERO: {"stage": 2, "offload_optimizer": NVME}},
     f"{ZERO}.offload_optimizer.device", "nvme", "requires stage 3", 'device "cpu"'),
    ({ZERO: {"stage": 3, "offload_optimizer": NVME | {"pipeline_read": True}}},
     f"{ZERO}.offload_optimizer.buffer_count", 4, "too few", "use 8 or more"),
    ({ZERO: {"stage": 3, "offload_optimizer": NVME | AHEAD}},
     f"{ZERO}.offload_optimizer.buffer_count", 4, "too few", "use 12 or more"),
    ({ZERO: {"stage": 3, "offload_param": NVME, "stage3_param_persistence_threshold": 10**6}},
     f"{ZERO}.stage3_param_persistence_threshold", 10**6, "unsharded", "use at most 262144"),
    ({ZERO: {"stage": 3, "offload_param": NVME, "offload_optimizer": NVME | {"fast_init": True}}},
     f"{ZERO}.offload_optimizer.fast_init", True, "starts from wrong weights", "remove it"),
]  # fmt: skip
# words on the command line of the default config
WORDS = [
    ("--mesh.ppp 2", "parallel3d.mesh.ppp = 2", "not a setting", 'nearest one is "pp"'),
    ("--MESH.pp 2", 'MESH = {"pp": 2}', "not a setting here", "did you mean parallel3d.mesh?"),
    ("--mesh.pp.x 2", "--parallel3d.mesh.pp.x: 'pp' is 1", "which has no settings", ""),
    ("--mesh..pp 2", 'parallel3d.mesh. = {"pp": 2}', "not a setting", "this block has: pp"),
    ("--mesh.pp", "--mesh.pp", "has no value", "write --mesh.pp value"),
    ("--mesh.pp --mesh.tp 2", "--mesh.pp", "has no value", "write --mesh.pp value"),
    ("mesh.pp 2", "'mesh.pp'", "unexpected argument", "--dotted.path value"),
    ("-mesh.pp 2", "'-mesh.pp'", "unexpected argument", "--dotted.path value"),
    ("--model.hidden_size big", 'hidden_size = "big"', "must be an integer", "whole number"),
    ("--checkpoint.evry 1", "parallel3d.checkpoint.evry = 1", "not a setting", '"every"'),
    ("--checkpoint.writer x", 'checkpoint.writer = "x"', "its own", "set parallel3d.che"),
    ("--pipeline.partition 1", "pipeline.partition = 1", "does not run", "set parallel3d.pip"),
]  # fmt: skip


def place_of(path, value, message):
    """Where the problem is said to be: the setting, or what is wrong inside it; and the value."""
    while value and (isinstance(value, dict) or message.count(f"{path}.0 = ")):
        inner = next(reversed(value)) if isinstance(value, dict) else 0
        if f"{path}.{inner}" not in message:
            break
        path = f"{path}.{inner}"
        value = value[inner]
    shown = json.dumps(value)
    return f"{path} = {shown if len(shown) <= 80 else f'{shown[:76]} ...'}: "


@pytest.mark.parametrize(
    ("key", "line"),
    [
        (
            "\u200bfp16",
            '"\\u200bfp16" = {"enabled": true}: is not a setting; the nearest one is "fp16"',
        ),
        ("", '"" = {"enabled": true}: is not a setting; this block has: '),
    ],
)
def test_key_that_cannot_be_seen_is_written_out(key, line):
    assert f"\n  {line}" in error_of(**{key: {"enabled": True}})


def check(message, place, rule, remedy):
    """The message has one problem, which says all of this."""
    assert "Traceback" not in message
    lines = message.splitlines()
    assert len(lines) == 1 or (len(lines) == 2 and "1 problem in " in lines[0]), message
    _, named_place, after = lines[-1].partition(place)
    assert named_place and rule in after and remedy in after, lines[-1]


@pytest.mark.parametrize(("path", "value", "rule", "remedy"), BAD)
def test_bad_value_is_named_with_rule_and_remedy(path, value, rule, remedy):
    # dp is given so that the batch is checked, too.
    message = error_of(**{f"{P3D}.mesh.dp": 1, path: value})
    check(message, place_of(path, value, message), rule, remedy)


@pytest.mark.parametrize(("changes", "path", "value", "rule", "remedy"), BAD_TOGETHER)
def test_contradicting_settings_are_named_with_rule_and_remedy(changes, path, value, rule, remedy):
    check(error_of(**changes), f"  {path} = {json.dumps(value)}: ", rule, remedy)


@pytest.mark.parametrize(("words", "place", "rule", "remedy"), WORDS)
def test_bad_words_on_the_command_line_give_one_message(words, place, rule, remedy):
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_json("ds.json", words.split())
    check(str(caught.value), place, rule, remedy)


@pytest.mark.parametrize(
    "path",
    [
        "train_micro_batch_size_per_gpu",
        "optimizer.params",
        "optimizer.params.lr",
        f"{ZERO}.stage",
        P3D,
        f"{P3D}.model.hidden_size",
    ],
)
def test_missing_setting_is_named(path):
    assert f"{path}: is required; add it: " in error_of(**{path: REMOVED})


def test_long_list_of_wrong_entries_gives_a_short_message():
    """The first five, and how many more; other settings are named all the same."""
    message = error_of(**{f"{P3D}.run.model_folders": [1] * 1000, STEPS: "many", "lr": 1})
    head, *lines = message.splitlines()
    assert "1002 problems in " in head and len(message) < 1000
    places = [f"{P3D}.run.model_folders.{i} = 1" for i in range(5)]
    for place in (*places, f"{P3D}.run.model_folders: 995 more", f'{STEPS} = "many"', "lr = 1"):
        assert sum(place in line for line in lines) == 1, place
    assert len(lines) == 8


def test_command_exits_with_2_and_prints_only_the_message(tmp_path, monkeypatch, capsys):
    file = tmp_path / "theirs.json"
    file.write_text(json.dumps(raw(**{STEPS: "many"})))
    monkeypatch.setattr("sys.argv", ["plan.py", "--config", str(file)])
    assert plan.main() == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 2
    check(captured.err, f'{STEPS} = "many": ', "must be an integer", "write a whole number")


def test_planned_mesh_requires_the_batch_size():
    planned = {f"{P3D}.mesh": "plan"}
    message = error_of(**planned)
    assert 'train_batch_size: is required with mesh "plan"' in message
    kept = {f"{P3D}.plan": {"fix": ["micro_batch"]}, "train_batch_size": 8}
    message = error_of(**planned, **kept, train_micro_batch_size_per_gpu=REMOVED)
    assert "train_micro_batch_size_per_gpu: is required, because parallel3d.plan.fix" in message
    message = error_of(**planned, **{f"{P3D}.plan": {"fix": ["tp"]}})
    assert 'parallel3d.plan.fix.0 = "tp": must be "zero_stage", "offload"' in message
    config = RunConfig.from_dict(raw(**planned, train_batch_size=8))
    assert config.is_planned and RunConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match=r'mesh = "plan": the mesh is not planned yet; use the'):
        config.resolve(4)


def test_unchanged_config_is_valid():
    """Otherwise each of them would fail for the same reason."""
    RunConfig.from_dict(raw(**{f"{P3D}.mesh.dp": 1}))
    llama = {f"{P3D}.mesh": {"tp": 12}, f"{P3D}.model": LLAMA}
    assert RunConfig.from_dict(raw(**llama)).mesh.tp == 12
