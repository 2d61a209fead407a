"""Activations between stages in tp parts: a tp-th of the bytes, and not a bit of another number."""

from dataclasses import replace

import pytest

from parallel3d.mesh.traffic import Traffic
from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case, Trainer
from tests.strict.running import run_strictly

pytestmark = pytest.mark.gloo

CASE = Case(
    mesh=(2, 1, 2),
    schedule="one_f_one_b",
    zero_stage=1,
    steps=2,
    batch=8,
    microbatches=2,
    model={"num_hidden_layers": 2},
)
ON = "parallel3d.pipeline.scatter_activations"


def train_on_rank(rank, scatter):
    """Losses and norms, without and with; the bytes that a rank sends."""
    case = replace(CASE, changes={ON: scatter})
    trainer = Trainer(case)
    with Traffic(trainer.mesh, ("send",)) as traffic:
        found = trainer.run()
    trainer.close()
    return found, sum(calls.bytes for calls in traffic.calls)


def both_on_rank(rank):
    return [train_on_rank(rank, scatter) for scatter in (False, True)]


def test_a_tp_th_is_sent_and_the_numbers_are_the_same():
    for (whole, sent), (scattered, part) in run_locally(both_on_rank, 4, timeout=60):
        assert whole == scattered
        assert sent == 2 * part > 0


@pytest.mark.slow
def test_under_the_rules_of_nccl():
    ranks = run_strictly(both_on_rank, 4, timeout=60)
    assert all(whole == scattered for (whole, _), (scattered, _) in ranks)
