"""Recomputed sub-layers and first layers train to the same bits as without recomputation."""

from dataclasses import replace

import pytest
import torch

from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case, Trainer, any_weights

pytestmark = pytest.mark.gloo

DROPOUT = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
LLAMA = {"family": "llama", "num_key_value_heads": 2}
SMALL = {"steps": 1, "batch": 6, "microbatches": 3}
TINY = {"steps": 1, "batch": 4, "microbatches": 2}
SHALLOW = {"num_hidden_layers": 2}
OFFLOADED = {"parallel3d.pipeline.offload_activations": "cpu"}
# A schedule that splits the backward, sequence parallelism, ZeRO-3's hooks; each sub-layer once.
ON_TWO = [
    (
        Case(mesh=(2, 1, 1), schedule="zero_bubble", zero_stage=1, model=DROPOUT | SHALLOW, **TINY),
        ["layernorm+core_attn+mlp_act"],
    ),
    (Case(mesh=(1, 1, 2), sequence_parallel=True, model=LLAMA | SHALLOW, **TINY), ["mlp"]),
    (Case(mesh=(1, 2, 1), schedule="one_f_one_b", model=SHALLOW, **TINY), ["full:1"]),
]
ON_FOUR = [
    (
        Case(mesh=(2, 1, 2), zero_stage=zero, schedule=schedule, stages_per_rank=v, **SMALL),
        ["full:1", "mlp", "layernorm+mlp_act"],
    )
    for zero, schedule, v in ((0, "v_shape", 2), (3, "one_f_one_b", 1), (1, "zb_v", 2))
] + [
    (
        Case(mesh=(1, 2, 2), zero_stage=zero, weights=weights, model=LLAMA, **SMALL),
        ["full:1", "mlp"],
    )
    for zero, weights in ((2, "per_microbatch"), (3, "per_step"), (3, "per_pass"))
]


def train_on_rank(rank, cases):
    """Losses, gradient norms and weights of each case."""
    results = []
    for case in cases:
        with any_weights():
            trainer = Trainer(case)
        numbers = []
        for step, batch in enumerate(trainer.batches()):
            numbers.append(float(trainer.executor.run(batch, step)))
            numbers.append(trainer.engine.step(trainer.lr).grad_norm)
        results.append((numbers, [weight.clone() for *_, weight in trainer.weights()]))
        trainer.close()
    return results


def check(groups):
    """Compare each way with none, and the last ones also with activations on the host.

    On two ranks the first group's is on the host: layers are told no more than where to keep them.
    """
    for ranks in (2, 4):
        cases = []
        plain_of = []
        for plain, ways in (g for g in groups if g[0].world_size == ranks):
            first = len(cases)
            cases += [plain, *(replace(plain, checkpointing=way) for way in ways)]
            if ranks == 4:
                cases.append(replace(cases[-1], changes=OFFLOADED))
            elif plain is groups[0][0]:
                cases[-1] = replace(cases[-1], changes=OFFLOADED)
            plain_of += [first] * (len(cases) - first)
        for results in run_locally(train_on_rank, ranks, cases, timeout=300) if cases else ():
            for case, first, (numbers, weights) in zip(cases, plain_of, results, strict=True):
                assert numbers == results[first][0], case
                assert all(map(torch.equal, weights, results[first][1])), case


def test_recomputation_gives_the_same_bits_on_two_ranks():
    check(ON_TWO)


@pytest.mark.slow
def test_recomputation_gives_the_same_bits_on_four_ranks():
    check(ON_FOUR)
