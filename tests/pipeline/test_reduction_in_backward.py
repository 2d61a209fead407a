"""Reductions within the backward that completes a stage: their order, once each, the same bits."""

from dataclasses import replace
from unittest.mock import patch

import pytest

from parallel3d.engine import reduction as reduction_file
from parallel3d.engine.quirks import reducing
from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case, Trainer, any_weights

pytestmark = pytest.mark.gloo

SMALL = {"steps": 2, "microbatches": 3, "batch": 12, "model": {"num_hidden_layers": 4}}
OVERLAP = "zero_optimization.overlap_comm"
BUCKET = {"zero_optimization.reduce_bucket_size": 2000}  # less than a block
FEW = SMALL | {"microbatches": 2, "batch": 8, "model": {"num_hidden_layers": 2}}
CASES = {
    "zero 3": Case(mesh=(1, 2, 1), weights="per_step", **FEW),
    "zero 0": Case(mesh=(1, 2, 1), zero_stage=0, **FEW),
}
SLOW = {
    "zero 1": Case(mesh=(1, 2, 1), zero_stage=1, tied=False, **SMALL),
    "zero 2, fp16": Case(mesh=(1, 2, 1), zero_stage=2, precision="fp16", **SMALL),
    "zero 0, bf16": Case(mesh=(1, 2, 1), zero_stage=0, precision="bf16", **SMALL),
    "on the host": Case(mesh=(1, 2, 1), offload="cpu", weights="per_step", **SMALL),
    "recomputed": Case(mesh=(1, 2, 1), weights="per_step", checkpointing="full", **SMALL),
    "tensor parallel": Case(mesh=(1, 2, 2), weights="per_step", sequence_parallel=True, **SMALL),
    "two stages": Case(
        mesh=(1, 2, 1), weights="per_pass", schedule="breadth_first", stages_per_rank=2, **SMALL
    ),
    "1F1B": Case(mesh=(2, 2, 1), schedule="one_f_one_b", weights="per_step", tied=False, **SMALL),
}


def trained_on_rank(rank, cases):
    """What `trained` returns of each case."""
    return [trained(case) for case in cases]


def trained(case):
    """Losses, norms and weights; with what was reduced during and after which backward."""
    with any_weights():
        trainer = Trainer(case)
    names = {id(h.parameter): h.name for h in trainer.engine.held}
    events = []
    reduce_now = reducing.reduce_now
    backward = trainer.engine.backward
    start = reduction_file.start_all_reduce

    def told(engine, parameters):
        parameters = list(parameters)
        events.append(("reduced", sorted(names[id(p)] for p in parameters)))
        reduce_now(engine, parameters)

    def started(*args):
        events.append(("started", []))
        return start(*args)

    def run_backward(*args, **kwargs):
        events.append(("backward", []))
        backward(*args, **kwargs)
        events.append(("done", []))

    trainer.engine.backward = run_backward
    with (
        patch.object(reducing, "reduce_now", told),
        patch.object(reduction_file, "start_all_reduce", started),
    ):
        losses, norms = trainer.run()
    weights = {h.name: trainer.engine.full_parameter(h) for h in trainer.engine.held}
    trainer.close()
    return losses, norms, weights, events


def inside(events, kind):
    """The index of the backward (0, 1, ...) within which each event of a kind came; else None."""
    reductions = []
    number = -1
    is_open = False
    for name, what in events:
        if name == "backward":
            number = number + 1
            is_open = True
        elif name == "done":
            is_open = False
        elif name == kind:
            reductions.append((number if is_open else None, what))
    return reductions


def check(case):
    changed = [replace(case, changes=case.changes | BUCKET | {OVERLAP: on}) for on in (True, False)]
    ranks = run_locally(trained_on_rank, case.world_size, changed, timeout=200)
    for (losses, norms, weights, under), (*plain, after) in ranks:
        assert (losses, norms) == tuple(plain[:2])
        assert all((weights[name] == value).all() for name, value in plain[2].items())
        assert {number for number, _ in inside(after, "reduced")} == {None}
        # In a step's last backward alone, and nothing twice.
        backwards = sum(name == "backward" for name, _ in under) // case.steps
        stages = case.stages_per_rank
        kind = "reduced" if case.zero_stage else "started"
        at = {number % backwards for number, _ in inside(under, kind) if number is not None}
        last = {backwards - 1} if stages == 1 else at & set(range(backwards))
        assert at == last and at
        names = [name for _, what in inside(under, "reduced") for name in what]
        everything = sorted(set(names))
        blocks = case.model["num_hidden_layers"] // case.mesh[0]
        assert sorted(names) == sorted(everything * case.steps)
        assert len(everything) > 12 * (blocks - 1)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_reduced_within_the_last_backward(name):
    check(CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_gradients_are_reduced_within_the_last_backward_on_all_sizes(name):
    check(SLOW[name])
