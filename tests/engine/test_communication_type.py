"""Gradients reduced in bf16: half the bytes at every ZeRO stage, and numbers as near as its own."""

from dataclasses import replace

import pytest

from parallel3d.mesh.traffic import Traffic
from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case, Trainer

pytestmark = pytest.mark.gloo

REDUCES = ("all_reduce", "reduce_scatter")
UNTIED = {"mesh": (1, 2, 1), "tied": False, "microbatches": 2, "batch": 4, "precision": "bf16"}
UNTIED["model"] = {"num_hidden_layers": 1}
CASES = {
    "zero 1": Case(zero_stage=1, **UNTIED),
    "zero 3": Case(weights="per_step", **UNTIED),
    "zero 0": Case(zero_stage=0, **UNTIED),
    "zero 2, each": Case(zero_stage=2, reduction="per_microbatch", **UNTIED),
    "zero 3, each": Case(reduction="per_microbatch", **UNTIED),
    "zero 2": Case(zero_stage=2, **UNTIED),
    "zero 3, hooks": Case(**UNTIED),
    "zero 1, overlap": Case(
        zero_stage=1, **UNTIED, changes={"zero_optimization.overlap_comm": True}
    ),
    "offload": Case(zero_stage=1, offload="cpu", **UNTIED),
}


def trained_each(rank, cases):
    return [trained(case) for case in cases]


def trained(case):
    """Losses and norms of the steps, and the bytes reduced in the first, for either type."""
    results = []
    for kind in ("fp32", "bf16"):
        changes = case.changes | {"communication_data_type": kind}
        trainer = Trainer(replace(case, changes=changes))
        first = trainer.executor.run
        count = []

        def counted(batch, step=0, run=first, trainer=trainer, count=count):
            with Traffic(trainer.mesh, REDUCES) as traffic:
                loss = run(batch, step)
            count.append(sum(c.bytes for c in traffic.calls))
            return loss

        trainer.executor.run = counted
        losses, norms = trainer.run()
        results.append((losses, norms, count[0]))
        trainer.close()
    return results


QUICK = ("zero 1", "zero 3")


OTHERS = tuple(name for name in CASES if name not in QUICK)


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["few", "more"]
)
def test_bf16_reductions_move_half_the_bytes(names):
    for rows in run_locally(trained_each, 2, [CASES[name] for name in names]):
        for name, (in_fp32, in_bf16) in zip(names, rows, strict=True):
            losses, norms, num_bytes = in_fp32
            near_losses, near_norms, num_near_bytes = in_bf16
            assert 0 < num_near_bytes == num_bytes / 2, name
            # Each gradient is rounded once, and their sum: by 2^-9 of it each time, as if at
            # random.
            assert near_norms[0] == pytest.approx(norms[0], rel=2**-8), name
            assert near_norms != norms, name
            assert near_losses == pytest.approx(losses, rel=2**-8), name
