"""ZeRO-1 and 2 move half the bytes where each gradient is reduced only to the rank that needs it.

An all-reduce moves each byte twice, a reduction to one rank once; a bucket then takes an operation
for each rank. Which is faster is for GPUs to show: benchmarks/gpu.py has both.
"""

import pytest

from parallel3d.mesh.traffic import Traffic
from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case, Trainer

pytestmark = pytest.mark.gloo

SETTING = "zero_optimization.use_multi_rank_bucket_allreduce"
SIZES = {"mesh": (1, 2, 1), "tied": False, "microbatches": 2, "batch": 8, "steps": 1}
SIZES["model"] = {"num_hidden_layers": 1}
CASES = [
    Case(zero_stage=stage, **SIZES, changes={SETTING: together})
    for stage in (1, 2)
    for together in (True, False)
]


def reduced_on_rank(rank, cases):
    """Losses of each case, its bytes by operation in the passes, and elements of its weights."""
    rows = []
    for case in cases:
        trainer = Trainer(case)
        with Traffic(trainer.mesh, ("all_reduce", "reduce")) as traffic:
            trainer.executor.run(trainer.batches()[0], 0)
        numel = sum(h.elements for h in trainer.engine.held)
        trainer.engine.step(0.0)
        rows.append((trainer.run(), {c.operation: c.bytes for c in traffic.calls}, numel))
        trainer.close()
    return rows


def test_reduction_to_one_rank_moves_half_the_bytes():
    for rows in run_locally(reduced_on_rank, 2, CASES):
        for case, (numbers, moved, numel) in zip(CASES, rows, strict=True):
            operation = "all_reduce" if case.changes[SETTING] else "reduce"
            assert moved == {operation: pytest.approx(4 * numel, rel=1e-3)}, case
            assert numbers == rows[2 * (case.zero_stage - 1)][0]
