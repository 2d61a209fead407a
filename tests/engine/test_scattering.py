"""ZeRO-1 and 2 reduce-scatter complete gradients, but over gloo, whose own is an all-reduce.

tests/strict trains every schedule and stage with it, under NCCL's rules.
"""

from contextlib import nullcontext
from unittest.mock import patch

import pytest

from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.traffic import Traffic
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.measure import TOLERANCE
from tests.cases import Case, Trainer, compare_on_rank
from tests.verify.measuring import errors_of, number_anew

pytestmark = pytest.mark.gloo

SIZES = {"tied": False, "microbatches": 2, "batch": 4, "steps": 1, "mesh": (1, 2, 1)}
SIZES |= {"model": {"num_hidden_layers": 1}}
ONE_MICROBATCH = SIZES | {"microbatches": 1}
SMALL_BUCKET = {"zero_optimization.reduce_bucket_size": 5_000}  # the model has 17,000 parameters
BF16_SUMS = {"communication_data_type": "bf16"}
MOE = {"family": "moe", "num_experts": 4, "num_hidden_layers": 1}
# Each way in which complete gradients come to DeepSpeed; ZeRO-1 with a small bucket is below.
CASES = {
    "zero2 per microbatch": Case(zero_stage=2, reduction="per_microbatch", **SIZES),
    "offloaded": Case(zero_stage=1, offload="cpu", precision="bf16", **ONE_MICROBATCH),
    "experts": Case(
        zero_stage=2, changes={"parallel3d.mesh.ep": 2}, **ONE_MICROBATCH | {"model": MOE}
    ),
}
MORE = {
    "zero1": Case(zero_stage=1, changes=SMALL_BUCKET, **SIZES),
    "zero2 bf16 sums": Case(zero_stage=2, precision="bf16", changes=BF16_SUMS, **SIZES),
    "zero1 bf16": Case(zero_stage=1, precision="bf16", changes=SMALL_BUCKET, **SIZES),
    "zero2 fp16": Case(zero_stage=2, precision="fp16", **SIZES),
    "copies": Case(
        zero_stage=1,
        precision="bf16",
        changes={"parallel3d.mesh.dp_shards": 2},
        **SIZES | {"mesh": (1, 4, 1), "batch": 8},
    ),
}


def reduced(case, scatters):
    """Losses, norms and weights, and the calls of a step's reductions over the shards."""
    number_anew()
    with patch.object(Mesh, "backend", "nccl") if scatters else nullcontext():
        trainer = Trainer(case)
        group = trainer.mesh.name_of(trainer.mesh.shards.group)
        with Traffic(trainer.mesh, ("all_reduce", "reduce_scatter")) as traffic:
            trainer.executor.run(trainer.batches()[0], 0)
        trainer.engine.step(0.0)
        numbers = trainer.run()
        weights = [value.tolist() for *_, value in trainer.weights()]
        elements = sum(h.elements for h in trainer.engine.held)
        trainer.close()
    calls = {c.operation: c.bytes for c in traffic.calls if c.group == group}
    return numbers, weights, calls, elements


def reduced_on_rank(rank, cases):
    """The results of each case with a reduce-scatter, and with an all-reduce."""
    return [(reduced(case, True), reduced(case, False)) for case in cases]


def scattered_on_rank(rank, case):
    return reduced(case, True)


def check(name, case, results):
    times = 2 if case.reduction == "per_microbatch" else 1
    bytes_each = 2 if case.changes == BF16_SUMS else 4
    for (numbers, weights, calls, elements), (other, others, all_reduced, _) in results:
        assert calls.get("all_reduce", 0) == 0 and "reduce_scatter" not in all_reduced, name
        if name != "experts":
            expected = pytest.approx(times * bytes_each * elements, rel=0.01)
            assert calls["reduce_scatter"] == expected == all_reduced["all_reduce"], name
        assert numbers == other and weights == others, name


@pytest.mark.parametrize(
    "cases", [CASES, pytest.param(MORE, marks=pytest.mark.slow)], ids=["few", "more"]
)
def test_reduce_scatter_has_the_bits_of_an_all_reduce_and_half_its_bytes(cases, cpu_adam):
    """A ring all-reduce sends its bytes twice, a reduce-scatter once; both are counted once."""
    for ranks in (2, 4):
        chosen = {name: case for name, case in cases.items() if case.world_size == ranks}
        if not chosen:
            continue
        trained = run_locally(reduced_on_rank, ranks, [*chosen.values()])
        for (name, case), results in zip(chosen.items(), zip(*trained, strict=True), strict=True):
            check(name, case, results)


def compared_on_rank(rank, case, reference):
    with patch.object(Mesh, "backend", "nccl"):
        return compare_on_rank(rank, case, reference)


def test_parts_of_three_ranks_equal_one_process():
    """The last rank's part is shorter; chunks end inside parameters."""
    changes = {"zero_optimization.reduce_bucket_size": 500}
    case = Case(zero_stage=1, changes=changes, **SIZES | {"mesh": (1, 3, 1), "batch": 6})
    ranks = run_locally(compared_on_rank, 3, case, case.reference, timeout=100)
    assert errors_of(case.config, ranks).within(TOLERANCE["fp32"])


def test_uneven_buckets_are_all_reduced():
    """The first of two stages is the first rank's alone; padding would double what is sent."""
    sizes = SIZES | {"model": {"num_hidden_layers": 2}}
    two = Case(zero_stage=1, stages_per_rank=2, schedule="interleaved", **sizes)
    _, _, calls, _ = run_locally(scattered_on_rank, 2, two)[0]
    assert "reduce_scatter" not in calls and calls["all_reduce"]
