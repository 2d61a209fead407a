"""The tests can fail: each takes one remedy away, and sees the fault that docs/deepspeed.md tells.

With every remedy in place the same runs equal plain transformers
(`test_remedies_give_the_numbers_of_transformers`).
"""

import signal
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest
import torch

from parallel3d.engine import Engine, EngineSettings
from parallel3d.engine.quirks import core
from parallel3d.engine.reduction import Reduction
from parallel3d.mesh.mesh import Mesh
from parallel3d.verify.local_ranks import RankFailed, RanksHung, run_locally
from tests.cases import Case, Trainer, compare_on_rank, measure, unpatched
from tests.verify.measuring import errors_of

pytestmark = pytest.mark.gloo

SMALL = {"steps": 2, "batch": 8}
PER_MICROBATCH = Case(mesh=(2, 1, 1), reduction="per_microbatch", tied=False, **SMALL)
TIED = Case(mesh=(2, 1, 1), tied=True, **SMALL)
UNTIED = Case(mesh=(2, 1, 1), tied=False, **SMALL)
# An embedding alone on its stage has nothing but weight decay.
ALONE = replace(UNTIED, mesh=(3, 1, 1), microbatches=2, batch=4, model={"num_hidden_layers": 1})


@contextmanager
def broadcast_over_the_world():  # row 1
    with patch.object(core, "skip_trace_check", lambda: None):
        yield


@contextmanager
def overwrite_gradients():  # row 2, ZeRO-3
    with (
        patch.object(core, "start_backward", lambda engine: None),
        patch.object(core, "accumulate_from_zero", lambda engine: None),
    ):
        yield


@contextmanager
def keep_the_boundary():  # row 2, ZeRO-1
    with patch.object(Engine, "accumulation", lambda engine: nullcontext()):
        yield


@contextmanager
def tell_deepspeed_of_microbatches():  # row 4
    deepspeed_config = EngineSettings.deepspeed_config
    step = Engine.step

    def config(settings, *sizes):
        config = deepspeed_config(settings, *sizes)
        size = {"train_batch_size": 4 * config["train_batch_size"]}
        return config | size | {"gradient_accumulation_steps": 4}

    def step_now(engine, lr):
        engine.deepspeed.set_gradient_accumulation_boundary(True)
        return step(engine, lr)

    with (
        patch.object(EngineSettings, "deepspeed_config", config),
        patch.object(Engine, "step", step_now),
    ):
        yield


@contextmanager
def count_by_deepspeed():  # row 6
    with patch.object(core, "count_once", lambda held: None):
        yield


@contextmanager
def no_placeholders():  # row 7
    def groups(held, placeholders, weight_decay, eps, rates, kinds):
        made = []
        for decays in (True, False):
            parameters = [h.parameter for h in held if h.spec.weight_decay is decays]
            made.append({"params": parameters, "weight_decay": weight_decay if decays else 0.0})
        return made

    with patch.object(core, "param_groups", groups):
        yield


@contextmanager
def no_placeholders_no_check():  # row 7
    with no_placeholders(), patch.object(Engine, "_check_groups", lambda self: None):
        yield


@contextmanager
def ends_apart():  # row 13
    with patch.object(Reduction, "sum_partial", lambda *_: None):
        yield


@contextmanager
def count_both_ends():  # row 13
    def count_once(held):
        for h in held:
            h.parameter.model_parallel = h.first

    with patch.object(core, "count_once", count_once):
        yield


@pytest.mark.parametrize(
    "case",
    [
        ALONE,
        *(  # such reductions and tied ends are by default in tests/verify/test_parity.py
            pytest.param(case, marks=pytest.mark.slow)
            for case in (
                PER_MICROBATCH,
                TIED,
                replace(PER_MICROBATCH, mesh=(1, 1, 1)),
                replace(PER_MICROBATCH, zero_stage=1),
                UNTIED,
                replace(UNTIED, mesh=(2, 2, 1)),
                replace(TIED, reduction="per_microbatch"),
                replace(TIED, zero_stage=1),
            )
        ),
    ],
    ids=str,
)
def test_remedies_give_the_numbers_of_transformers(case):
    errors = measure(case)
    assert errors.within(1e-5), errors


WRONG = [
    (replace(PER_MICROBATCH, mesh=(1, 1, 1)), overwrite_gradients, 0.1),
    (replace(PER_MICROBATCH, zero_stage=1), keep_the_boundary, 0.1),
    (UNTIED, tell_deepspeed_of_microbatches, 0.5),
    (UNTIED, count_by_deepspeed, 0.1),
    (TIED, ends_apart, 0.01),
    (replace(TIED, reduction="per_microbatch"), ends_apart, 0.01),
    (TIED, count_both_ends, 0.01),
    (replace(TIED, zero_stage=1), count_both_ends, 0.01),
]


def each_on_rank(rank, jobs):
    return [compare_on_rank(rank, *job) for job in jobs]


@cache
def without_each(world_size):
    """(case, fault) -> the largest differences, in one start of so many ranks."""
    chosen = [(case, fault) for case, fault, _ in WRONG if case.world_size == world_size]
    jobs = [(case, case.reference, fault) for case, fault in chosen]
    ranks = run_locally(each_on_rank, world_size, jobs)
    by_case = zip(*ranks, strict=True)
    return {
        (case, fault): errors_of(case.config, deviations)
        for (case, fault), deviations in zip(chosen, by_case, strict=True)
    }


@pytest.mark.parametrize(
    ("case", "fault", "at_least"),
    WRONG,
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@unpatched
def test_gradient_norm_is_wrong_without_each_remedy(case, fault, at_least):
    errors = without_each(case.world_size)[case, fault]
    print(f"{fault.__name__:32} {errors}")
    assert errors.grad_norm > at_least, errors


@unpatched
def test_direct_backward_overwrites_and_fails_on_a_cpu():
    # On a CPU the gradients that it leaves behind cannot be given to a stream, or the next
    # microbatch finds none where they were counted; a GPU says nothing.
    with pytest.raises(RankFailed, match=r"unknown parameter type|no attribute \S*numel"):
        measure(PER_MICROBATCH, overwrite_gradients, run_locally)


@unpatched
def test_pipeline_stops_without_the_bound_trace_check():
    case = replace(UNTIED, mesh=(2, 2, 1))
    with pytest.raises((RanksHung, RankFailed)) as caught:
        measure(case, broadcast_over_the_world, run_locally, timeout=4, quiet=True)
    print(type(caught.value).__name__, str(caught.value).splitlines()[-1])


def test_stages_with_unequal_optimizer_groups_are_refused():
    with pytest.raises(RankFailed, match="different numbers of optimizer groups"):
        measure(ALONE, no_placeholders, run_locally)


@unpatched
def test_unequal_optimizer_groups_give_a_wrong_norm_or_hang():
    try:
        errors = measure(ALONE, no_placeholders_no_check, run_locally, timeout=6, quiet=True)
    except (RanksHung, RankFailed) as stopped:
        print(type(stopped).__name__, str(stopped).splitlines()[-1])
    else:
        print(errors)
        assert errors.grad_norm > 1e-3


def stopped_peer(rank, seconds):
    import os

    mesh = Mesh(pp=2)
    if seconds is not None:
        mesh.set_timeouts(seconds)
    mesh.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    mesh.barrier()


def test_stopped_peer_is_noticed_only_by_short_timeouts():
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"(?i)time"):
        run_locally(stopped_peer, 2, 0.5)
    assert time.monotonic() - start < 60
    with pytest.raises(RanksHung):
        run_locally(stopped_peer, 2, None, timeout=1.5, quiet=True)


MANY = 24  # microbatches, of one sequence each


def gradients(rank, ways):
    return [gradient(*way) for way in ways]


def gradient(microbatches, precision, in_fp32):
    in_their_type = patch.object(core, "accumulate_in_fp32", lambda held: None)
    sizes = {"steps": 1, "batch": MANY, "model": {"num_hidden_layers": 1}, "weights": "per_step"}
    with nullcontext() if in_fp32 else in_their_type:
        trainer = Trainer(Case(precision=precision, microbatches=microbatches, **sizes))
    flat = []
    step = trainer.engine.step

    def look(lr):
        shards = trainer.engine.deepspeed.optimizer.averaged_gradients
        flat.extend(g.float().flatten() for group in shards.values() for g in group)
        return step(lr)

    trainer.engine.step = look
    trainer.run()
    trainer.close()
    return torch.cat(flat)


def test_bf16_gradients_of_many_microbatches_need_an_fp32_sum():
    ways = [(1, "fp32", True), (1, "bf16", True), (MANY, "bf16", True), (MANY, "bf16", False)]
    [(true, *sums)] = run_locally(gradients, 1, ways)
    one, many, without = [float((value - true).norm() / true.norm()) for value in sums]
    print(f"relative error: M=1 {one:.1e}, M={MANY} in fp32 {many:.1e}, in bf16 {without:.1e}")
    assert many < 1.2 * one
    assert without > 1.5 * many


def rounded_by_the_reduction(rank, cases):
    """The share of the gradients' norm that is lost between their fp32 sum and the optimizer."""
    losses = [0.0] * len(cases)
    for number, case in enumerate(cases):
        trainer = Trainer(case)
        summed = {}
        engine = trainer.engine
        run = engine._reduction.sum_partial
        step = engine.deepspeed.optimizer.optimizer.step

        def note(held, run=run, summed=summed):
            held = list(held)
            run(held)
            summed |= {h.name: h.parameter.grad.double() for h in held}

        def look(*args, engine=engine, step=step, summed=summed, number=number):
            lost = 0.0
            whole = 0.0
            for block in engine.states._blocks:
                for place in block:
                    piece = place.piece
                    reached = engine.states.masters[place.group].grad
                    if reached is None:  # another group is updated
                        continue
                    reached = reached.flatten()[place.offset :][: piece.numel].double()
                    true = summed[piece.held.name].flatten()[piece.start :][: piece.numel]
                    true = true * (reached @ true) / (true @ true)  # clipped
                    lost += float((reached - true).square().sum())
                    whole += float(reached @ reached)
            losses[number] = max(losses[number], (lost / whole) ** 0.5)
            return step(*args)

        engine._reduction.sum_partial = note
        engine.deepspeed.optimizer.optimizer.step = look
        trainer.run()
        trainer.close()
    return losses


def test_sums_of_microbatches_reach_the_optimizer_in_fp32():
    """DeepSpeed copies them into buckets of the weights' type: 2e-3 of the norm is lost."""
    settings = [(0, "none"), (1, "cpu"), (2, "none"), (3, "none")]
    sizes = {"steps": 1, "batch": 4, "microbatches": 2, "model": {"num_hidden_layers": 1}}
    cases = [
        Case(zero_stage=stage, offload=offload, precision="bf16", **sizes)
        for stage, offload in settings
    ]
    [kept] = run_locally(rounded_by_the_reduction, 1, cases)
    print(dict(zip(settings, kept, strict=True)))
    assert max(kept) < 1e-6
