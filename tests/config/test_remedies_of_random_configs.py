"""Random configs of values at bounds: none is a traceback, and no remedy changes nothing."""

import random

import pytest

from tests.config.configs import LLAMA
from tests.config.test_remedies import applied, edits_of, problems_of

pytestmark = pytest.mark.pure

P3D = "parallel3d"
NVME = {"device": "nvme", "nvme_path": "/x"}
ON = {"enabled": True}
SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
VALUES = {
    f"{P3D}.mesh.pp": [1, 2, 3, 4, 7, 8],
    f"{P3D}.mesh.tp": [1, 2, 3, 4, 5, 8],
    f"{P3D}.mesh.cp": [1, 2, 3, 5],
    f"{P3D}.mesh.ep": [1, 2, 3, 4],
    f"{P3D}.mesh.dp": ["auto", 1, 2, 3, 4, 6],
    f"{P3D}.mesh.dp_shards": [None, 1, 2, 3, "node"],
    f"{P3D}.mesh.sequence_parallel": [True, False],
    f"{P3D}.pipeline.schedule": ["gpipe", "interleaved", "zero_bubble", "zb_v", "v_shape"],
    f"{P3D}.pipeline.stages_per_rank": [1, 2, 3, 4],
    f"{P3D}.pipeline.gradient_reduction": ["auto", "per_step", "per_microbatch"],
    f"{P3D}.pipeline.activation_checkpointing": ["none", "full", "selective", "mlp"],
    f"{P3D}.pipeline.offload_activations": ["none", "cpu"],
    f"{P3D}.train.compile": ["auto", "none", "pointwise", "block"],
    f"{P3D}.train.noise_scale_every": [0, 5],
    f"{P3D}.train.check_bits": [{"recompute_every": 7}],
    f"{P3D}.train.on_spike": ["ignore", "skip", "rewind", "stop"],
    f"{P3D}.train.batch_schedule": [[], [[0, 8], [64, 16]], [[0, 6], [60, 10]]],
    f"{P3D}.train.batch_lr": ["none", "sqrt"],
    f"{P3D}.train.lr_schedule": [{"type": "wsd", "decay_steps": 9, "warmup_steps": 5}],
    f"{P3D}.checkpoint.every": [0, 5],
    f"{P3D}.data.sequence_length": [8, 31, 32, 100, 127, 128, 129],
    f"{P3D}.data.isolate_documents": [True, False],
    f"{P3D}.data.balance_microbatches": [True, False],
    "zero_optimization.stage": [0, 1, 2, 3],
    "zero_optimization.offload_optimizer": [{"device": "cpu"}, NVME],
    "zero_optimization.offload_param": [{"device": "cpu"}, NVME],
    "train_batch_size": [None, 1, 7, 8, 16, 24],
    "train_micro_batch_size_per_gpu": [None, 1, 2, 3, 5],
    "gradient_accumulation_steps": [None, 1, 2, 3, 4],
    "fp16": [ON],
    "bf16": [ON],
    "optimizer.type": ["AdamW", "Adam", "Muon"],
    "scheduler": [{"type": "WarmupLR"}],
}
FAMILIES = [LLAMA, {"family": "gpt"} | SIZES, {"family": "moe"} | SIZES]
OF_EXPERTS = {
    "num_experts": [1, 2, 3, 6, 8],
    "num_experts_per_tok": [1, 2, 3, 9],
    "n_group": [1, 2, 3, 8],
    "topk_group": [1, 2, 3, 9],
    "first_k_dense_replace": [0, 1, 3, 4, 5],
    "decoder_sparse_step": [1, 2, 3, 4, 5],
    "capacity_factor": [None, 0.5, 9.0],
    "router_aux_loss": ["microbatch", "sequence", "pooled"],
}


def random_changes(numbers: random.Random) -> dict[str, object]:
    model = dict(numbers.choice(FAMILIES))
    if model["family"] == "moe":
        for name in numbers.sample(list(OF_EXPERTS), 2):
            model[name] = numbers.choice(OF_EXPERTS[name])
    changes: dict[str, object] = {f"{P3D}.model": model}
    for path in numbers.sample(list(VALUES), numbers.randint(1, 7)):
        changes[path] = numbers.choice(VALUES[path])
    return changes


@pytest.mark.slow  # thousands of configs; by default the tables have each rule
@pytest.mark.parametrize("seed", range(4))
def test_each_remedy_removes_its_error_from_a_random_config(seed):
    """Of the remedies whose words `edits_of` understands."""
    numbers = random.Random(seed)
    tried = 0
    for _ in range(1000):
        changes = random_changes(numbers)
        for problem in problems_of(changes):
            for edits in filter(None, edits_of(problem)):
                tried += 1
                after = problems_of(applied(changes, edits))
                same = [p for p in after if (p.path, p.rule) == (problem.path, problem.rule)]
                assert not same, f"{edits} changes nothing: {problem}, {changes}"
    assert tried > 300
