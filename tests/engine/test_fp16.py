"""fp16 with a loss scale: as good as fp32, and one decision about each step over the whole mesh."""

from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise, product
from unittest.mock import patch

import pytest
import torch
from deepspeed.runtime.utils import has_inf_or_nan
from deepspeed.runtime.zero import stage_1_and_2

from parallel3d.engine.quirks import fp16
from parallel3d.verify.local_ranks import RankFailed, run_locally
from tests.cases import Case, Trainer, unpatched
from tests.verify.measuring import number_anew

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("cpu_adam")]

STEPS = 12
FEW_STEPS = 6
MESHES = [(1, 1, 1), (1, 4, 1), (1, 1, 4), (4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)]
DYNAMIC = {"initial_scale_power": 12, "hysteresis": 1, "loss_scale_window": 4}
FAST = DYNAMIC | {"loss_scale_window": 2}
ONE_LAYER = {"num_hidden_layers": 1}
FIXED = {"loss_scale": 512.0}


def small(mesh=(1, 1, 1), scale=DYNAMIC, more=None, **settings):
    """A case of fp16 with a loss scale, and with `more` settings of the config."""
    changes = {f"fp16.{name}": value for name, value in scale.items()} | (more or {})
    sizes = {"batch": 8, "microbatches": 2, "model": {"num_hidden_layers": 2}}
    return Case(mesh, precision="fp16", changes=changes, **sizes | settings)


def train(rank, case, plant=None, fault=nullcontext):
    """Loss, result and a weight's largest move of each step; `plant` is a step and a rank."""
    with fault():
        trainer = Trainer(case)
        engine = trainer.engine
        mesh = trainer.mesh
        steps = []
        weight = next(h for h in engine.held if h.spec.weight_decay)
        assert case.precision != "fp16" or weight.parameter.dtype is torch.float16
        before = engine.full_parameter(weight).clone()
        for step, batch in enumerate(trainer.batches()):
            if plant == (step, rank):
                spoil_next_gradient(engine)
            losses = mesh.messages.gather_floats([trainer.executor.run(batch, step)])
            loss = sum(row[0] for row in losses) / (mesh.replicas.size * mesh.tensor.size)
            result = engine.step(trainer.lr)
            after = engine.full_parameter(weight).clone()
            steps.append((loss, result, float((after - before).abs().max())))
            before = after
        trainer.close()
    return steps


def train_each(rank, cases, *options):
    """Train the cases one after another on one rank."""
    results = []
    for case in cases:
        number_anew()
        results.append(train(rank, case, *options))
    return results


def spoil_next_gradient(engine):
    """Let this rank's next backward leave an infinite gradient in one element of one weight."""
    parameter = next(h for h in engine.held if h.spec.weight_decay).parameter

    def spoil(gradient):
        handle.remove()
        gradient = gradient.clone()
        gradient.view(-1)[0] = float("inf")
        return gradient

    handle = parameter.register_hook(spoil)


def assert_follows_fp32(case):
    ranks = run_locally(train, case.world_size, case)
    for rank in ranks[1:]:
        assert [(loss, result) for loss, result, _ in rank] == [(x, r) for x, r, _ in ranks[0]]
    true = case.reference
    loss_errors = []
    norm_errors = []
    for (value, result, _), right, norm in zip(ranks[0], true.losses, true.grad_norms, strict=True):
        loss_errors.append(abs(value - right) / right)
        norm_errors.append(abs(result.grad_norm - norm) / norm)
    loss = max(loss_errors)
    norm = max(norm_errors)
    print(f"{case!s:76} {case.changes}: loss {loss:.1e}  norm {norm:.1e}")
    assert 0 < loss < 1e-4
    assert norm < 0.01
    return [result for _, result, _ in ranks[0]]


@pytest.mark.parametrize(
    ("mesh", "stage", "reduction"),
    [
        pytest.param((1, 1, 1), 0, "per_step", marks=pytest.mark.slow),
        pytest.param((1, 2, 1), 2, "per_microbatch", marks=pytest.mark.slow),
        pytest.param((1, 1, 2), 1, "per_step", marks=pytest.mark.slow),
        ((2, 1, 1), 3, "per_microbatch"),
    ],
    ids=str,
)
def test_fp16_follows_fp32(mesh, stage, reduction):
    """The dynamic scale doubles every two steps."""
    options = {"zero_stage": stage, "reduction": reduction, "steps": FEW_STEPS, "model": ONE_LAYER}
    results = assert_follows_fp32(small(mesh, FAST, **options))
    assert all(r.applied and not r.overflow for r in results)
    scales = [r.loss_scale for r in results]
    assert scales[0] == 2**12 and scales[-1] >= 2**14
    assert all(b in (a, 2 * a) for a, b in pairwise(scales))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "stage", "fixed"), list(product(MESHES, range(4), [False, True])), ids=str
)
def test_fp16_follows_fp32_in_full(mesh, stage, fixed):
    reduction = "per_microbatch" if fixed else "per_step"
    scale = FIXED if fixed else DYNAMIC
    case = small(mesh, scale, zero_stage=stage, reduction=reduction, steps=STEPS)
    assert_follows_fp32(case)


@pytest.mark.parametrize(
    "kinds",
    [
        [((1, 1, 2), 2, "cpu"), ((2, 1, 1), 3, "cpu")],
        *(
            pytest.param([kind], marks=pytest.mark.slow)
            for kind in [
                ((1, 2, 1), 0, "none"),
                ((2, 1, 1), 1, "none"),
                ((2, 2, 1), 0, "cpu"),
                ((2, 2, 1), 1, "none"),
                ((1, 2, 2), 2, "cpu"),
                ((2, 2, 1), 3, "none"),
                ((2, 1, 2), 3, "cpu"),
            ]
        ),
    ],
    ids=str,
)
def test_overflow_on_one_rank_skips_the_step_on_all_ranks(kinds):
    cases = []
    for mesh, stage, offload in kinds:
        settings = {"zero_stage": stage, "offload": offload, "steps": 6, "model": ONE_LAYER}
        cases.append(small(mesh, FAST, microbatches=1, **settings))
    size = cases[0].world_size
    ranks = run_locally(train_each, size, cases, (1, size - 1))
    for case, by_rank in zip(cases, zip(*ranks, strict=True), strict=True):
        for steps in by_rank:
            results = [result for _, result, _ in steps]
            assert results == [result for _, result, _ in by_rank[0]], case
            assert [r.overflow for r in results] == [i == 1 for i in range(6)], case
            assert [r.applied for r in results] == [i != 1 for i in range(6)], case
            moves = [move for _, _, move in steps]
            assert moves[1] == 0 and all(move > 0 for i, move in enumerate(moves) if i != 1), case
            # Halved once, and doubled after two steps without overflow.
            scales = [r.loss_scale for r in results]
            assert scales == [2**12] * 2 + [2**11] * 3 + [2**12], case
            # The scale is gone from the norm, whatever it is.
            norms = [r.grad_norm for i, r in enumerate(results) if i != 1]
            assert max(norms) < 1.5 * min(norms), case


def nothing(*_):
    """Stand in for a remedy."""


def nothing_later(*_):
    return nothing


@contextmanager
def without(remedy, instead=nothing):
    """A function of quirks/fp16.py is taken away."""
    with patch.object(fp16, remedy, instead):
        yield


@unpatched
def test_overflow_repeats_if_skipped_gradients_are_kept(cpu_adam):
    case = small(zero_stage=1, offload="cpu", steps=4)
    gone = partial(without, "forget_skipped_gradients")
    [steps] = run_locally(train, 1, case, (1, 0), gone)
    assert [result.overflow for _, result, _ in steps] == [False, True, True, True]


def test_direct_backward_without_announcement_is_refused():
    gone = partial(without, "expect_scaled_gradient")
    with pytest.raises(RankFailed, match="Loss scaling is required"):
        run_locally(train, 2, small((2, 1, 1), steps=1, model=ONE_LAYER), None, gone)


@contextmanager
def old_cpu():
    from deepspeed.accelerator import get_accelerator

    with (
        patch.object(get_accelerator(), "is_fp16_supported", lambda: False),
        patch.object(fp16, "allow_fp16_on_cpu", lambda device: None),
    ):
        yield


def test_fp16_without_allowance_needs_a_cpu_with_fp16():
    with pytest.raises(RankFailed, match="fp16 is not supported on your device"):
        run_locally(train, 1, small(steps=1, model=ONE_LAYER), None, old_cpu)


@unpatched
def test_scale_that_grows_before_the_step_halves_the_gradients():
    case = small(steps=STEPS)
    gone = partial(without, "grow_scale_after_step", nothing_later)
    [steps] = run_locally(train, 1, case, None, gone)
    norms = case.reference.grad_norms
    ratios = [r.grad_norm / norm for (_, r, _), norm in zip(steps, norms, strict=True)]
    assert sum(abs(ratio - 0.5) < 0.1 for ratio in ratios) >= 2  # it grew every fourth step


def test_weights_do_not_depend_on_the_scale():
    """Seen without clipping, and with Adam's steps proportional to the gradients."""
    plain = {"gradient_clipping": 0.0, "optimizer.params.eps": 1.0, "optimizer.params.lr": 1.0}
    growing = {"initial_scale_power": 8, "loss_scale_window": 1}
    fixed = {"loss_scale": 256.0}
    cases = [
        small(scale=scale, more=plain, zero_stage=stage, steps=4, microbatches=1, model=ONE_LAYER)
        for stage in (1, 3)
        for scale in (growing, fixed)
    ]
    [runs] = run_locally(train_each, 1, cases)
    for grown, fixed in (runs[:2], runs[2:]):
        assert grown[-1][1].loss_scale >= 2**10 and fixed[-1][1].loss_scale == 2**8
        for (_, a, move), (_, b, want) in zip(grown, fixed, strict=True):
            assert a.grad_norm == pytest.approx(b.grad_norm, rel=0.01)
            assert move == pytest.approx(want, rel=0.02)


@contextmanager
def scale_each_rank_by_itself():
    """What would happen if ranks decided alone: DeepSpeed's agreement over the model is cut."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

    with patch.object(Stage3, "_model_parallel_all_reduce", lambda optimizer, tensor, op: None):
        yield


@unpatched
def test_stages_diverge_without_agreement_over_the_mesh():
    """The one that saw the overflow skips its step, the other one takes it."""
    case = small((2, 1, 1), tied=False, steps=3)
    first, second = run_locally(train, 2, case, (1, 1), scale_each_rank_by_itself)
    assert [r.applied for _, r, _ in second] == [True, False, True]
    assert [r.applied for _, r, _ in first] == [True, True, True]


@contextmanager
def counting_looks():
    """Count DeepSpeed's looks at single gradients for what is not finite."""
    with patch.object(stage_1_and_2, "has_inf_or_nan", wraps=has_inf_or_nan) as looks:
        yield
        assert looks.call_count == 0


@pytest.mark.parametrize(
    "kinds",
    [
        [((2, 1, 1), 2, "cpu"), ((1, 1, 2), 0, "none")],
        pytest.param([((1, 2, 1), 1, "none")], marks=pytest.mark.slow),
    ],
    ids=["few", "more"],
)
def test_norm_alone_skips_a_step_of_bf16(kinds):
    """It has no loss scale."""
    settings = {"batch": 8, "microbatches": 2, "precision": "bf16", "steps": 3, "model": ONE_LAYER}
    cases = [Case(mesh, zero_stage=z, offload=o, **settings) for mesh, z, o in kinds]
    ranks = run_locally(train_each, 2, cases, (1, 1), counting_looks)
    for case, by_rank in zip(cases, zip(*ranks, strict=True), strict=True):
        for steps in by_rank:
            results = [result for _, result, _ in steps]
            assert results == [result for _, result, _ in by_rank[0]], case
            assert [r.applied for r in results] == [True, False, True], case
            assert results[1].norm == float("inf"), case
            assert all(r.loss_scale == 1 and not r.overflow for r in results), case
            assert [move > 0 for *_, move in steps] == [True, False, True], case
