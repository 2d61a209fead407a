"""Weights that stay gathered for a pass or a step: the same numbers for a fraction of the bytes."""

from dataclasses import replace
from math import prod

import pytest
import torch

from parallel3d.mesh.traffic import Traffic
from parallel3d.schedule.action import Op
from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case, Trainer, measure
from tests.schedule.blocking import most_gathered

pytestmark = pytest.mark.gloo

BREADTH = Case(
    mesh=(1, 2, 1),
    schedule="breadth_first",
    stages_per_rank=4,
    weights="per_pass",
    model={"num_hidden_layers": 6},
    steps=2,
)
MOVES = ("all_gather", "reduce_scatter")
GPIPE = Case(mesh=(1, 2, 1), weights="per_pass", steps=2, model={"num_hidden_layers": 1})


def second_steps(rank, cases):
    return [second_step(case) for case in cases]


def second_step(case):
    """Bytes gathered and reduced in a step, and how many parameters this rank has."""
    trainer = Trainer(case)
    first, second = trainer.batches()
    trainer.executor.run(first)
    trainer.engine.step(trainer.lr)
    with Traffic(trainer.mesh) as traffic:
        trainer.executor.run(second, 1)
    moved = {c.operation: c.bytes for c in traffic.calls if c.operation in MOVES}
    numel = sum(prod(h.cut.local_shape) for h in trainer.engine.held)
    trainer.close()
    return moved, numel


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "case",
    [
        GPIPE,
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (BREADTH, replace(GPIPE, mesh=(2, 2, 1)))
        ),
    ],
    ids=str,
)
def test_bytes_of_a_step_do_not_grow_with_microbatches(case, precision):
    """Weights at most twice, gradients (fp32) once: 8 bytes a parameter and step in bf16."""
    size = {"fp32": 4, "bf16": 2}[precision]
    cases = [replace(case, microbatches=m, batch=4, precision=precision) for m in (1, 2)]
    for (few, numel), (many, _) in run_locally(second_steps, case.world_size, cases):
        assert few == many
        assert few.keys() == set(MOVES)
        # gpipe's passes follow each other: held over both
        passes = 1 if case.schedule == "gpipe" else 2
        assert few["all_gather"] <= passes * size * numel
        assert few["reduce_scatter"] == 4 * numel


@pytest.mark.slow  # it shows what the test above saves
def test_each_microbatch_gathers_twice_if_weights_are_not_kept():
    case = replace(GPIPE, batch=8, weights="per_microbatch")
    for ((moved, numel),) in run_locally(second_steps, 2, [case]):
        assert moved["all_gather"] > 7 * 4 * numel  # four microbatches, forward and backward


def peak_of_stages(rank, case):
    """The most parameters gathered after any action, and those of the two largest stages."""
    trainer = Trainer(case)
    stages = trainer.stages.module.stages
    most = [0]

    def watched(method):
        def run(stage, microbatch):
            method(stage, microbatch)
            if method is gather:
                trainer.engine.wait_for_weights(stage)
            most[0] = max(most[0], sum(p.numel() for p in stages.parameters()))

        return run

    gather = trainer.executor.methods[Op.GATHER]
    trainer.executor.methods = {op: watched(m) for op, m in trainer.executor.methods.items()}
    trainer.executor.run(trainer.batches()[0])
    sizes = [sum(p.ds_numel for p in stage.parameters()) for stage in stages.values()]
    expected = most_gathered(trainer.executor.schedule.programs[trainer.mesh.pipeline.coord])
    left = sum(p.numel() for p in trainer.stages.module.parameters())
    trainer.close()
    return most[0], sorted(sizes), len(expected), left


def test_breadth_first_holds_weights_of_two_stages_at_most():
    two = {"num_hidden_layers": 2}  # each a stage, between those of the embedding and the head
    case = replace(BREADTH, tied=False, steps=1, batch=4, microbatches=2, model=two)
    for most, sizes, expected, left in run_locally(peak_of_stages, 2, case):
        assert expected == 2 and len(sizes) == 4
        assert max(sizes) < most <= sum(sizes[-2:]) < sum(sizes)
        assert left == 0  # all is let go of


@pytest.mark.usefixtures("operators")
def test_kept_weights_match_one_process():
    """What is kept whole; all else is in tests/verify/test_parity.py."""
    sizes = {"mesh": (1, 2, 1), "batch": 4, "microbatches": 2, "model": {"num_hidden_layers": 1}}
    case = Case(weights="per_step", reduction="per_microbatch", thresholds=True, **sizes)
    errors = measure(case)
    assert errors.within(1e-5), errors


def numbers(rank, cases):
    """Losses and norms of each case's clipped steps, and one rank's weights."""
    results = []
    for case in cases:
        trainer = Trainer(case)
        losses, norms = trainer.run()
        results.append((losses, norms, [w for *_, w in trainer.weights()]))
        trainer.close()
    return results


def test_results_equal_those_of_gathering_each_time():
    """To the bit on one mesh: what is gathered is the same, and gradients add up alike."""
    one = Case(
        mesh=(1, 2, 1),
        schedule="breadth_first",
        stages_per_rank=3,
        batch=4,
        microbatches=2,
        model={"num_hidden_layers": 1},
    )
    cases = [replace(one, weights=w) for w in ("per_microbatch", "per_pass", "per_step")]
    for (losses, norms, weights), *others in run_locally(numbers, 2, cases):
        for their_losses, their_norms, theirs in others:
            assert their_losses == losses
            assert their_norms == pytest.approx(norms, rel=1e-6)
            assert all(torch.equal(a, b) for a, b in zip(weights, theirs, strict=True))
