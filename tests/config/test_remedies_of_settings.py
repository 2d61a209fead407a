"""Remedies that leave a choice, or name several settings: each choice is made, and is valid."""

import re
from copy import deepcopy

import pytest

from parallel3d.base.section import Problem, Problems
from parallel3d.config import RunConfig
from parallel3d.config.deepspeed_keys import ANY
from tests.config.configs import REMOVED, raw
from tests.config.test_config_deepspeed import KEYS, placed
from tests.config.wrong_data import (
    ACCUMULATION,
    BATCH,
    FALLBACKS,
    KIND,
    MICRO,
    NOISE,
    P3D,
    RECOMPUTE,
    ROWS_OF_DATA,
    SCHEDULE,
    SHARDS,
    STREAM,
    TEXT,
    data,
    llama,
    model,
)

pytestmark = pytest.mark.pure

ROWS = [
    *ROWS_OF_DATA,
    # Mesh, batch and length
    (
        {FALLBACKS: ["1x1x2"], f"{P3D}.mesh.dp": "auto"},
        "use a number, or remove fallbacks",
        [{FALLBACKS: ["1x1x2"], f"{P3D}.mesh.dp": 2}, {f"{P3D}.mesh.dp": "auto"}],
    ),
    (
        {FALLBACKS: ["2x2"], f"{P3D}.mesh.dp": 2},
        "write pp x dp x tp, as in 2x2x1",
        [{FALLBACKS: ["2x2x1"], f"{P3D}.mesh.dp": 2}],
    ),
    ({f"{P3D}.mesh": "plan"}, "add it: samples per step", [{f"{P3D}.mesh": "plan", BATCH: 8}]),
    (
        {f"{P3D}.mesh": "plan", BATCH: 8, MICRO: REMOVED, f"{P3D}.plan": {"fix": ["micro_batch"]}},
        "add it: samples per microbatch and rank",
        [{f"{P3D}.mesh": "plan", BATCH: 8, MICRO: 2, f"{P3D}.plan": {"fix": ["micro_batch"]}}],
    ),
    (
        {f"{P3D}.plan": {"fix": ["offload"]}},
        'remove it, or write "mesh": "plan"',
        [{}, {f"{P3D}.mesh": "plan", BATCH: 8, f"{P3D}.plan": {"fix": ["offload"]}}],
    ),
    (
        {MICRO: REMOVED},
        "add it: samples per microbatch, on each data-parallel rank (or train_b",
        [{MICRO: 2}, {MICRO: REMOVED, BATCH: 8}],
    ),
    (
        {f"{P3D}.train": {}},
        "set exactly one of steps, max_tokens, epochs",
        [
            {f"{P3D}.train": {"steps": 1}},
            {f"{P3D}.train": {"max_tokens": 10**6}},
            {f"{P3D}.train": {"epochs": 1}},
        ],
    ),
    (
        {f"{P3D}.train": {"epochs": 1}} | data(TEXT, STREAM, {"count": "as-read"}),
        "use steps or max_tokens",
        [
            {f"{P3D}.train": {"steps": 1}} | data(TEXT, STREAM, {"count": "as-read"}),
            {f"{P3D}.train": {"max_tokens": 10**6}} | data(TEXT, STREAM, {"count": "as-read"}),
        ],
    ),
    (
        {f"{P3D}.train.batch_lr": "sqrt"},
        "remove it, or add batch_schedule",
        [{}, {f"{P3D}.train.batch_lr": "sqrt", SCHEDULE: [[0, 8]], ACCUMULATION: REMOVED}],
    ),
    (
        {SCHEDULE: [[1, 8]], ACCUMULATION: REMOVED},
        "write [[0, 64], [1000, 128]]",
        [{SCHEDULE: [[0, 64], [1000, 128]], ACCUMULATION: REMOVED}],
    ),
    (
        {SCHEDULE: [[0, 8]], BATCH: 16, ACCUMULATION: REMOVED},
        "use 8, or remove it",
        [
            {SCHEDULE: [[0, 8]], BATCH: 8, ACCUMULATION: REMOVED},
            {SCHEDULE: [[0, 8]], ACCUMULATION: REMOVED},
        ],
    ),
    (
        {SCHEDULE: [[0, 8]], ACCUMULATION: REMOVED, "scheduler": {"type": "WarmupLR"}},
        "use parallel3d.train.lr_schedule, which then counts samples",
        [{SCHEDULE: [[0, 8]], ACCUMULATION: REMOVED, f"{P3D}.train.lr_schedule": {}}],
    ),
    (
        {SCHEDULE: [[0, 8], [64, 10]], ACCUMULATION: REMOVED, f"{P3D}.mesh.dp": 2},
        "use multiples of 4, or a micro batch x dp that divides 8, 10: at most 2",
        [
            {SCHEDULE: [[0, 8], [64, 12]], ACCUMULATION: REMOVED, f"{P3D}.mesh.dp": 2},
            {SCHEDULE: [[0, 8], [64, 10]], ACCUMULATION: REMOVED, f"{P3D}.mesh.dp": 2, MICRO: 1},
        ],
    ),
    (
        {"scheduler": {"type": "WarmupLR"}, f"{P3D}.train.lr_schedule": {"type": "cosine"}},
        "remove one of them",
        [{"scheduler": {"type": "WarmupLR"}}, {f"{P3D}.train.lr_schedule": {"type": "cosine"}}],
    ),
    (
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10}}},
        "use 1000 or more, or a shorter warm-up",
        [
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 1000}}},
            {
                "scheduler": {
                    "type": "WarmupDecayLR",
                    "params": {"total_num_steps": 10, "warmup_num_steps": 5},
                }
            },
        ],
    ),
    (
        {f"{P3D}.train.lr_schedule": {"type": "wsd", "warmup_steps": 20, "decay_steps": 12}},
        "let the two add up to at most 10",
        [{f"{P3D}.train.lr_schedule": {"type": "wsd", "warmup_steps": 4, "decay_steps": 6}}],
    ),
    (
        {f"{P3D}.train.profile": {"start": 8, "steps": 3}},
        "use steps = 2 or less, or an earlier start",
        [
            {f"{P3D}.train.profile": {"start": 8, "steps": 2}},
            {f"{P3D}.train.profile": {"start": 7, "steps": 3}},
        ],
    ),
    (
        {SCHEDULE: [[0, 8], [64, 16]], f"{P3D}.mesh.dp": 2},
        'use "auto"',
        [{SCHEDULE: [[0, 8], [64, 16]], f"{P3D}.mesh.dp": 2, ACCUMULATION: "auto"}],
    ),
    # Mesh and what it excludes
    (
        {f"{P3D}.mesh": {"dp": 1, "ep": 2, "dp_shards": 3}} | model(),
        "use a mesh.ep that divides mesh.dp, or null here",
        [
            {f"{P3D}.mesh": {"dp": 1, "ep": 1, "dp_shards": None}} | model(),
            {f"{P3D}.mesh": {"dp": 1, "ep": 1, "dp_shards": 1}} | model(),
        ],
    ),
    (
        {SHARDS: 2, "zero_optimization": {"stage": 2, "contiguous_gradients": False}},
        "use true, or dp_shards = null",
        [
            {SHARDS: 2, "zero_optimization": {"stage": 2, "contiguous_gradients": True}},
            {SHARDS: None, "zero_optimization": {"stage": 2, "contiguous_gradients": False}},
        ],
    ),
    (
        {SHARDS: "node", "zero_optimization": {"stage": 0}},
        "use stage 1, 2 or 3, or null here",
        [
            *({SHARDS: "node", "zero_optimization": {"stage": stage}} for stage in (1, 2, 3)),
            {SHARDS: None, "zero_optimization": {"stage": 0}},
        ],
    ),
    (
        {NOISE: 5, f"{P3D}.mesh": {"dp": 1}},
        "use dp = 2 or more, or 0 here",
        [{NOISE: 5, f"{P3D}.mesh": {"dp": 2}}, {NOISE: 0, f"{P3D}.mesh": {"dp": 1}}],
    ),
    (
        {NOISE: 5, "zero_optimization": {"stage": 2}, f"{P3D}.mesh": {"dp": 2}},
        'set parallel3d.pipeline.gradient_reduction = "per_step", or 0 here',
        [
            {
                NOISE: 5,
                "zero_optimization": {"stage": 2},
                f"{P3D}.mesh": {"dp": 2},
                f"{P3D}.pipeline": {"gradient_reduction": "per_step"},
            },
            {NOISE: 0, "zero_optimization": {"stage": 2}, f"{P3D}.mesh": {"dp": 2}},
        ],
    ),
    (
        {f"{P3D}.pipeline": {"schedule": "zero_bubble"}, "zero_optimization": {"stage": 2}},
        'use "per_step"',
        [
            {
                f"{P3D}.pipeline": {"schedule": "zero_bubble", "gradient_reduction": "per_step"},
                "zero_optimization": {"stage": 2},
            }
        ],
    ),
    (
        {RECOMPUTE: 9, f"{P3D}.train.compile": "block"},
        'use 0, or train.compile = "pointwise"',
        [
            {RECOMPUTE: 0, f"{P3D}.train.compile": "block"},
            {RECOMPUTE: 9, f"{P3D}.train.compile": "pointwise"},
        ],
    ),
    (
        {RECOMPUTE: 9, f"{P3D}.mesh": {"cp": 2}},
        "use 0, or mesh.cp = 1",
        [{RECOMPUTE: 0, f"{P3D}.mesh": {"cp": 2}}, {RECOMPUTE: 9, f"{P3D}.mesh": {"cp": 1}}],
    ),
    (
        {f"{P3D}.pipeline.offload_activations": "cpu"} | model(),
        'use "none", or recomputation',
        [
            {f"{P3D}.pipeline.offload_activations": "none"} | model(),
            {f"{P3D}.pipeline.activation_checkpointing": "full"} | model(),
        ],
    ),
    (
        {f"{P3D}.mesh": {"cp": 16, "tp": 4, "sequence_parallel": True}}
        | data(TEXT, {"sequence_length": 32}),
        "use sequence_parallel = false",
        [
            {f"{P3D}.mesh": {"cp": 16, "tp": 4, "sequence_parallel": False}}
            | data(TEXT, {"sequence_length": 32})
        ],
    ),
    # The model
    (
        model(num_experts=8, n_group=4, topk_group=1, num_experts_per_tok=3),
        "use 2 or less, or a larger topk_group",
        [
            model(num_experts=8, n_group=4, topk_group=1, num_experts_per_tok=2),
            model(num_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3),
        ],
    ),
    (
        model(num_experts=8, n_group=4, topk_group=5),
        "use 4 or less",
        [model(num_experts=8, n_group=4, topk_group=4)],
    ),
    (model(num_experts=8, n_group=8), "use 4 or less", [model(num_experts=8, n_group=4)]),
    (
        model(num_experts=2, num_experts_per_tok=3),
        "use 2 or less",
        [model(num_experts=2, num_experts_per_tok=2)],
    ),
    (
        model(decoder_sparse_step=5),
        'use 4 or less, or family = "llama"',
        [model(decoder_sparse_step=4), llama()],
    ),
    (
        model(first_k_dense_replace=4),
        'lower it, or use family = "llama"',
        [model(first_k_dense_replace=3), llama()],
    ),
    (
        model(num_experts=8, num_experts_per_tok=2, capacity_factor=5.0),
        "use at most 4, or null for no limit",
        [
            model(num_experts=8, num_experts_per_tok=2, capacity_factor=4.0),
            model(num_experts=8, num_experts_per_tok=2, capacity_factor=None),
        ],
    ),
    (model(partial_rotary_factor=0.2), "use 0.125", [model(partial_rotary_factor=0.125)]),
    (
        llama(num_attention_heads=5),
        "use 4 heads, or set head_dim",
        [
            llama(num_attention_heads=4, num_key_value_heads=2),
            llama(num_attention_heads=5, num_key_value_heads=1, head_dim=16)
            | {f"{P3D}.mesh.tp": 1},
        ],
    ),
    (llama(head_dim=7), "use an even number, such as 8", [llama(head_dim=8)]),
    (
        llama(layer_types=["sliding_attention"] * 4),
        "set it, in tokens",
        [llama(layer_types=["sliding_attention"] * 4, sliding_window=64)],
    ),
    (
        llama(layer_types=["full_attention"] * 3),
        "list 4",
        [llama(layer_types=["full_attention"] * 4)],
    ),
    (
        llama(rope_scaling={"factor": 8.0, "low_freq_factor": 4.0}),
        "use more than 4.0",
        [llama(rope_scaling={"factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.5})],
    ),
    (
        llama(rope_scaling={"rope_type": "yarn", "factor": 8.0, "beta_fast": 0.5}),
        "use 1.0 or more",
        [llama(rope_scaling={"rope_type": "yarn", "factor": 8.0, "beta_fast": 1.0})],
    ),
    (
        {KIND: {"type": "mup"}},
        "set it to the hidden_size at which they were tuned",
        [{KIND: {"type": "mup", "base_width": 32}}],
    ),
    (
        {KIND: {"base_width": 32}},
        'use "mup", or remove it',
        [{KIND: {"type": "mup", "base_width": 32}}, {KIND: {}}],
    ),
    (
        {f"{P3D}.pipeline.activation_checkpointing": "some"},
        "use none, selective, mlp, full, {",
        [
            *(
                {f"{P3D}.pipeline.activation_checkpointing": value}
                for value in (
                    "none",
                    "selective",
                    "mlp",
                    "full",
                    {"full": 2},
                    "full:2",
                    ["mlp_act"],
                )
            )
        ],
    ),
    (
        {f"{P3D}.run.name": "a/b"},
        "use letters and digits, as in run-1",
        [{f"{P3D}.run.name": "run-1"}],
    ),
    (
        {f"{P3D}.run.directory": "s3://bucket/runs"},
        "name a folder of one",
        [{f"{P3D}.run.directory": "/tmp/bucket/runs"}],
    ),
    (
        {f"{P3D}.run.directory": "x" * 300},
        "write a shorter path",
        [{f"{P3D}.run.directory": "x" * 200}],
    ),
    (
        {f"{P3D}.run.directory": "a\tb"},
        "contains the control character U+0009; remove it",
        [{f"{P3D}.run.directory": "ab"}],
    ),
    # Optimizers
    (
        {"optimizer.type": "Muon", KIND: {"type": "mup", "base_width": 32}},
        'use "spectral" or "match_rms_adamw"',
        [
            {
                "optimizer.type": "Muon",
                KIND: {"type": "mup", "base_width": 32},
                "optimizer.params.scale": scale,
            }
            for scale in ("spectral", "match_rms_adamw")
        ],
    ),
    (
        {"optimizer.type": "Muon", "optimizer.params.coefficients": []},
        "use [3.4445, -4.775, 2.0315]",
        [{"optimizer.type": "Muon", "optimizer.params.coefficients": [3.4445, -4.775, 2.0315]}],
    ),
    (
        {"optimizer.type": "Muon", "optimizer.params.coefficients": [9, -4, 2]},
        'use "jordan", or coefficients',
        [
            {"optimizer.type": "Muon", "optimizer.params.coefficients": "jordan"},
            {"optimizer.type": "Muon", "optimizer.params.coefficients": [1.5, -0.5, 0.0]},
        ],
    ),
    # Blocks that must be off
    (
        {"compile": {"disable": False}},
        "write false, or remove compile, or set",
        [{"compile": {"deepcompile": False}}, {}, {f"{P3D}.train.compile": "pointwise"}],
    ),
    (
        {"data_efficiency": {"seed": 1}},
        "write false, or remove data_efficiency",
        [{"data_efficiency": {"seed": 1, "enabled": False}}, {}],
    ),
    (
        {"amp": {"opt_level": "O1"}},
        "write false, or use bf16",
        [{"amp": {"opt_level": "O1", "enabled": False}}, {"bf16": {"enabled": True}}],
    ),
    (
        {"hybrid_engine": {"enabled": False, "rows": 1}},
        "remove it",
        [{"hybrid_engine": {"enabled": False}}],
    ),
    ({"wandb": {"Enabled": True}}, 'the nearest one is "enabled"', [{"wandb": {"enabled": True}}]),
]


def problems_of(changes: dict[str, object]) -> tuple[Problem, ...]:
    try:
        RunConfig.from_dict(raw(**changes))
    except Problems as error:
        return error.problems
    return ()


@pytest.mark.parametrize(("wrong", "remedy", "mends"), ROWS, ids=range(len(ROWS)))
def test_each_alternative_of_a_remedy_is_valid(wrong, remedy, mends):
    problems = problems_of(wrong)
    assert any(remedy in f"{problem.rule}; {problem.remedy}" for problem in problems), problems
    for mend in mends:
        assert not problems_of(mend), mend


# A value for each setting that a refused key of DeepSpeed, or of an earlier release, points to.
OURS = {
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    MICRO: 2,
    f"{P3D}.checkpoint": {"every": 5},
    f"{P3D}.mesh.cp": 2,
    f"{P3D}.mesh.dp": 2,
    SHARDS: 1,
    f"{P3D}.mesh.ep": 1,
    f"{P3D}.mesh.sequence_parallel": True,
    f"{P3D}.mesh.tp": 2,
    f"{P3D}.model.vocab_size": 4096,
    f"{P3D}.pipeline": {"schedule": "gpipe"},
    f"{P3D}.pipeline.activation_checkpointing": "full",
    f"{P3D}.pipeline.offload_activations": "cpu",
    f"{P3D}.pipeline.weights": "per_step",
    f"{P3D}.run.save_weights": True,
    f"{P3D}.train.compile": "pointwise",
}
# Remedies of another form, and what they ask for.
IN_WORDS = {
    'use "offload_optimizer": {"device": "cpu"}': [
        {"zero_optimization.offload_optimizer": {"device": "cpu"}}
    ],
    'use "offload_param": {"device": "cpu"}': [
        {"zero_optimization.offload_param": {"device": "cpu"}, "zero_optimization.stage": 3}
    ],
    "use offload_optimizer.pin_memory": [
        {"zero_optimization.offload_optimizer": {"device": "cpu", "pin_memory": True}}
    ],
    "set stage3_param_persistence_threshold": [
        {"zero_optimization.stage3_param_persistence_threshold": 1000}
    ],
    "use that": [{"aio.intra_op_parallelism": 2}],
    "set first_k_dense_replace or decoder_sparse_step": [
        model(first_k_dense_replace=1),
        model(decoder_sparse_step=2),
    ],
}


def refused_keys() -> list[tuple[str, dict[str, object]]]:
    """Return each refused key, with changes that set it to a refused value."""
    rows = []
    for path, key in KEYS:
        refused: object = {key.switch: True} if key.switch else "?"
        if key.values != (ANY,):
            rows.append((path, placed(path, refused)))
        for item, values in key.items.items():
            if values != (ANY,):
                rows.append((path, placed(path, {item: "?"})))
    return rows


REFUSED = refused_keys()


@pytest.mark.parametrize(("path", "wrong"), REFUSED, ids=range(len(REFUSED)))
def test_refused_key_is_removed_and_our_setting_is_written(path, wrong):
    rest = {name: value for name, value in deepcopy(wrong).items() if name != path}
    problems = problems_of(wrong)
    assert problems
    for problem in problems:
        mends = IN_WORDS.get(problem.remedy, [])
        named = [name for name in OURS if _is_named(name, problem.remedy)]
        assert mends or named or "remove it" in problem.remedy or "the family" in problem.remedy
        if "remove it" in problem.remedy:
            mends = [{}]
        for mend in [*mends, {name: OURS[name] for name in named}]:
            assert not problems_of(deepcopy(rest | mend)), (problem, mend)


def _is_named(name: str, remedy: str) -> bool:
    """True if the remedy names this setting, and not a longer name."""
    return bool(re.search(rf"(?:set|use|and) {re.escape(name)}(?![\w.])", remedy))
