"""Copies of ZeRO's shards (mesh.dp_shards): every mode equals one process of plain transformers."""

import pytest

from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.measure import TOLERANCE
from tests.cases import Case, compare_on_rank
from tests.verify.measuring import errors_of, number_anew

pytestmark = pytest.mark.gloo

MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-3, "weight_decay": 0.1}}}


def case_of(mesh=(1, 4, 1), shards=2, changes=(), **settings):
    changes = {"parallel3d.mesh.dp_shards": shards, **dict(changes)}
    return Case(mesh=mesh, changes=changes, **settings)


# Each way in which gradients are reduced, and each precision of their sums.
CASES = {
    "zero3": case_of(),
    "zero3 per microbatch, offloaded, Muon": case_of(
        reduction="per_microbatch", offload="cpu", changes=MUON
    ),
    "zero1 bf16": case_of(zero_stage=1, precision="bf16"),
    "zero2 per microbatch, fp16": case_of(
        zero_stage=2, reduction="per_microbatch", precision="fp16"
    ),
    "zero1 offloaded, one rank a copy": case_of(
        mesh=(1, 2, 1, 2), shards=1, zero_stage=1, offload="cpu", sequence_parallel=True
    ),
    "zero3 per pass, cp inside a copy": case_of(
        mesh=(1, 2, 2, 1), shards=1, weights="per_pass", precision="bf16"
    ),
}


def compare_each(rank, cases):
    """Train the cases one after another on one rank, and compare each with its reference."""
    deviations = []
    for case, reference in cases:
        number_anew()
        deviations.append(compare_on_rank(rank, case, reference))
    return deviations


@pytest.fixture(scope="module")
def errors():
    """The errors of all cases, which the same ranks run."""
    jobs = [(case, case.reference) for case in CASES.values()]
    by_case = zip(*run_locally(compare_each, 4, jobs), strict=True)
    pairs = zip(CASES.items(), by_case, strict=True)
    return {name: errors_of(case.config, of_ranks) for (name, case), of_ranks in pairs}


@pytest.mark.parametrize("name", CASES)
def test_copies_equal_one_process(name, errors):
    print(f"{name:40} {errors[name]}")
    assert errors[name].within(TOLERANCE[CASES[name].precision]), errors[name]
