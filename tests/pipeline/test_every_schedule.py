"""Run every schedule file for real at several sizes: the numbers of one process of PyTorch.

Sizes with several stages on a rank, or all of them on one, are where a stage hands over to itself.
"""

import time
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from parallel3d.base.errors import ScheduleError
from parallel3d.engine.quirks import core
from parallel3d.pipeline.executor import Executor
from parallel3d.schedule.schedule import Action, Op, peak_in_flight, validate
from parallel3d.schedule.schedules import (
    make_evaluation,
    make_schedule,
    names,
    splits_backward,
    why_not,
)
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.reference import first_weights
from tests.cases import Case, Trainer, measure
from tests.verify.measuring import batches, errors_of, losses_of

pytestmark = pytest.mark.gloo

SHIPPED = ("gpipe", "interleaved", "one_f_one_b", "v_shape")  # valid on any number of ranks
LIKE_NCCL = 6  # with so many microbatches


def cases(name, pp, few):
    """The sizes at which the schedule can be run, with a layer or more for a stage.

    `few`: the least stages a rank that it takes, most microbatches, and a single step.
    """
    for stages_per_rank in (1, 2, 3):
        for microbatches in (LIKE_NCCL,) if few else (1, 3, LIKE_NCCL):
            once = stages_per_rank == 2 or splits_backward(name)
            if not why_not(name, pp, microbatches, stages_per_rank):
                yield Case(
                    mesh=(pp, 1, 1),
                    schedule=name,
                    stages_per_rank=stages_per_rank,
                    microbatches=microbatches,
                    batch=12,
                    steps=1 if few else 2,
                    zero_stage=3 if microbatches == 3 else 1,
                    reduction="per_step" if once else "per_microbatch",
                    model={"num_hidden_layers": max(3, pp * stages_per_rank - 1)},
                )
                if few:
                    return


def behave_like_nccl(mesh):
    """Transfers that hold up their rank until the peer is there, on one channel without tags.

    As gloo's they never say of themselves that they are done.
    """

    def blocking(start):
        def transfer(tensor, pp_coord, tag):
            start(tensor, pp_coord, 0).wait()
            return SimpleNamespace(wait=lambda: None, is_completed=lambda: False)

        return transfer

    mesh.isend = blocking(mesh.isend)
    mesh.irecv = blocking(mesh.irecv)


def counting(executor):
    """Runs `executor` with a count of what it holds after each action, and of messages sent."""
    most = {"inputs": 0, "outputs": 0, "held": 0, "sent": 0}

    def watched(method):
        def run(stage, microbatch):
            method(stage, microbatch)
            posted = sum(action.op is Op.RECV_F for action in executor.flow.arriving)
            most["inputs"] = max(most["inputs"], len(executor.flow.inputs) - posted)
            most["outputs"] = max(most["outputs"], len(executor.flow.outputs))
            sent = sum(action.op is Op.SEND_F for action in executor.flow.sending)
            most["sent"] = max(most["sent"], sent)
            most["held"] = max(
                most["held"], len(executor.flow.outputs) + len(executor.flow.deferred)
            )

        return run

    executor.methods = {op: watched(method) for op, method in executor.methods.items()}
    return most


def train_all_on_rank(rank, cases, references):
    results = []
    for case, reference in zip(cases, references, strict=True):
        trainer = Trainer(case)
        if case.microbatches == LIKE_NCCL:
            behave_like_nccl(trainer.mesh)
        evaluator = trainer.evaluator
        evaluator_holds = counting(evaluator)
        start = evaluator.run(trainer.batches()[0])
        holds = counting(trainer.executor)
        measured = trainer.compare(reference)
        left = [
            len(held)
            for e in (trainer.executor, evaluator)
            for held in (
                e.flow.inputs,
                e.flow.outputs,
                e.flow.gradients,
                e.flow.arriving,
                e.flow.sending,
                e.flow.deferred,
            )
        ]
        coord = trainer.mesh.pipeline.coord
        at_most = max(peak_in_flight(trainer.executor.schedule)[coord], 1)
        memory = coord, at_most, holds, evaluator_holds, sum(left)
        results.append((measured, start, memory))
        trainer.close()
    return results


def train_all(cases):
    """Case -> what each rank came to: all in one start of ranks."""
    references = [case.reference for case in cases]
    ranks = run_locally(train_all_on_rank, cases[0].world_size, cases, references)
    return dict(zip(cases, zip(*ranks, strict=True), strict=True))


@cache
def few_of_each(pp):
    return train_all([case for name in names() for case in cases(name, pp, few=True)])


# On one process each order is the same; on four it was never another answer than on two.
# What else a size changes, tests/schedule/ shows of the programs, and test_parity.py of numbers.
@pytest.mark.parametrize(
    ("pp", "few"), [(2, True), *(pytest.param(n, False, marks=pytest.mark.slow) for n in (1, 2, 4))]
)
@pytest.mark.parametrize("name", names())
def test_against_one_process(name, pp, few):
    """Training and evaluation, in which a rank holds no more than the schedule says."""
    todo = list(cases(name, pp, few))
    assert todo or name not in SHIPPED, "no size is valid"
    if not todo:
        pytest.skip(f"on {pp} ranks: {why_not(name, pp, LIKE_NCCL, 1)}")
    results = few_of_each(pp) if few else train_all(todo)
    for case in todo:
        trained, starts, memory = zip(*results[case], strict=True)
        errors = errors_of(case.config, trained)
        assert errors.within(1e-5), f"{case}: {errors}"
        tokens, labels, _ = next(batches(case.config))
        start = losses_of(case.config, first_weights(case.config), tokens, labels).mean().item()
        assert sum(starts) == pytest.approx(start, rel=1e-6), case
        for coord, at_most, holds, evaluator_holds, left in memory:
            where = f"{case}, coordinate {coord}"
            # Where backwards are split, an output goes with I, but what W needs stays.
            split = splits_backward(case.schedule)
            assert holds["held"] == at_most, where
            assert holds["outputs"] == at_most or (split and holds["outputs"] <= at_most), where
            if case.microbatches == LIKE_NCCL:  # a sent output goes when its gradient is there
                assert holds["sent"] <= at_most, where
            assert holds["inputs"] <= at_most + 1, where  # one more, which its F has not taken yet
            assert evaluator_holds["outputs"] <= case.stages_per_rank, where
            assert left == 0, where


@contextmanager
def old_gradients():
    with patch.object(core, "accumulate_from_zero", lambda engine: None):
        yield


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(
    ("zero_stage", "offload"), [(3, "none"), pytest.param(2, "cpu", marks=pytest.mark.slow)]
)
def test_gradients_of_the_last_step_return_unless_zeroed(zero_stage, offload):
    """DeepSpeed overwrites them in a rank's first backward of a step, whatever its stage."""
    case = Case(
        mesh=(2, 1, 1),
        schedule="interleaved",
        stages_per_rank=2,
        zero_stage=zero_stage,
        offload=offload,
        reduction="per_microbatch",
        steps=2,
        batch=4,
        microbatches=2,
    )
    assert measure(case, old_gradients).grad_norm > 0.1


def swap_on_rank(rank, seconds):
    """A step of a program in which the last rank wants its tensors in another order."""
    case = Case(mesh=(2, 1, 1), schedule="v_shape", stages_per_rank=2, microbatches=2)
    trainer = Trainer(case)
    good = trainer.executor.schedule
    last = list(good.programs[1])
    i, j = (last.index(Action(op, s, 0)) for op, s in ((Op.RECV_F, 1), (Op.SEND_F, 2)))
    last[i], last[j] = last[j], last[i]
    bad = replace(good, programs=(good.programs[0], tuple(last)))
    with pytest.raises(ScheduleError):
        validate(bad)
    old = trainer.executor
    executor = Executor(bad, old.mesh, old.engine, key=old._key, hidden_shape=old.hidden_shape)
    trainer.mesh.set_timeouts(seconds)
    start = time.monotonic()
    try:
        executor.run(trainer.batches()[0])
    except (RuntimeError, KeyError) as error:
        return type(error).__name__, time.monotonic() - start
    return "nothing", 0.0


def test_hanging_program_is_refused_and_ends_by_the_timeout():
    first, last = run_locally(swap_on_rank, 2, 1.0)
    assert last[0] == "KeyError"  # it has nothing to send yet
    assert first[0] == "RuntimeError" and first[1] < 10


def test_evaluation_keeps_the_placement_of_the_schedule():
    schedule = make_schedule("v_shape", 2, 3, 2)
    assert make_evaluation(schedule).pp_coord_of_stage == (0, 1, 1, 0)
