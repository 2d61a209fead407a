"""Copies of shards: every pair of settings that can go together equals one process.

The cases that the default tests take from it: tests/engine/test_copies.py.
"""

import pytest

from parallel3d.schedule import schedules
from parallel3d.verify.measure import TOLERANCE
from tests.cases import Case, measure
from tests.engine.test_copies import MUON
from tests.meshes import sizes_of
from tests.verify.pairwise import pairs, pairwise, possible_pairs

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

# The mesh, and the dp ranks of a copy.
MESHES = [
    ((1, 4, 1), 2),
    ((1, 4, 1), 1),
    ((2, 4, 1), 2),
    ((1, 8, 1), 4),
    ((1, 4, 2), 2),
    ((1, 2, 2, 2), 1),
]
STAGES = {
    name: stages
    for name in schedules.names()
    for stages in (3, 2, 1)
    if schedules.why_not(name, 2, 4, stages) is None
}
SETTINGS = {
    "mesh": MESHES,
    "zero": [1, 2, 3],
    "offload": ["none", "cpu", "nvme"],
    "muon": [False, True],
    "precision": ["fp32", "bf16", "fp16"],
    "schedule": list(STAGES),
    "reduction": ["per_step", "per_microbatch"],
    "weights": ["per_microbatch", "per_pass", "per_step"],
}


def can_be(row):
    """Whether a config with these settings is one that is not refused."""
    if row["offload"] == "nvme" and (row["zero"] < 3 or row["muon"]):
        return False
    if row["weights"] != "per_microbatch" and row["zero"] < 3:
        return False
    splits = schedules.splits_backward(row["schedule"])
    return not (splits and row["reduction"] == "per_microbatch")


TABLE = pairwise(SETTINGS, can_be, seed=0)


def label(row):
    mesh, shards = row["mesh"]
    words = [f"{'x'.join(map(str, mesh))}({shards})", f"zero{row['zero']}", row["offload"]]
    words += [row["precision"], row["schedule"], row["reduction"], row["weights"]]
    return " ".join([*words, *(["muon"] if row["muon"] else [])])


def case_of(row, folder):
    mesh, shards = row["mesh"]
    changes = {"parallel3d.mesh.dp_shards": shards, "optimizer.params.eps": 1e-6}
    stages = STAGES[row["schedule"]]
    if sizes_of(mesh).pp == 1:
        stages = min(stages, 2)
    return Case(
        mesh=mesh,
        schedule=row["schedule"],
        stages_per_rank=stages,
        zero_stage=row["zero"],
        offload=row["offload"],
        folder=str(folder),
        reduction=row["reduction"],
        weights=row["weights"],
        sequence_parallel=sizes_of(mesh).tp > 1,
        precision=row["precision"],
        microbatches=4,
        batch=32,
        changes=changes | (MUON if row["muon"] else {}),
    )


def test_every_pair_is_in_the_table():
    assert set().union(*map(pairs, TABLE)) >= possible_pairs(SETTINGS, can_be).keys()


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("row", TABLE, ids=label)
def test_copies_equal_one_process_in_every_pair(row, tmp_path):
    case = case_of(row, tmp_path)
    errors = measure(case, timeout=500)
    print(f"{label(row):80} {errors.loss:.1e} {errors.grad_norm:.1e} {errors.weight:.1e}")
    assert errors.within(TOLERANCE[row["precision"]]), errors
