"""fp16 with a loss scale: as good as fp32, and one decision about each step over the whole mesh."""

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch

from parallel3d.engine import Engine
from parallel3d.engine.quirks import fp16
from tests.ranks import RankFailed, run_ranks
from tests.verify import parity
from tests.verify.parity import Case

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("operators")]

STEPS, SMALL = 12, {"batch": 16, "precision": "fp16"}
MESHES = [(1, 1, 1), (1, 4, 1), (1, 1, 4), (4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)]
DYNAMIC = {"initial_scale_power": 12, "hysteresis": 1, "loss_scale_window": 4}


def train(rank, case, fp16, plant=None, take_away=None, more=None):
    """Loss, result and a weight's largest move of each step; `plant` is a step and a rank."""
    if take_away:
        take_away()
    settings_of = parity.settings_of
    parity.settings_of = lambda case: replace(settings_of(case), fp16=fp16, **(more or {}))
    trainer = parity.Trainer(case)
    engine, mesh, found = trainer.engine, trainer.mesh, []
    weight = next(h for h in engine.held if h.spec.weight_decay)
    assert case.precision != "fp16" or weight.parameter.dtype is torch.float16
    before = engine.full_parameter(weight).clone()
    for step, (tokens, labels) in enumerate(parity.batches_of(case, trainer.config)):
        if plant == (step, rank):
            spoil_next_gradient(engine)
        local = trainer.executor.run(trainer.microbatches(tokens, labels), step)
        losses = mesh.gather_floats([local])
        loss = sum(row[0] for row in losses) / (mesh.size("dp") * mesh.size("tp"))
        result = engine.step(engine.settings.lr)
        after = engine.full_parameter(weight).clone()
        found.append((loss, result, float((after - before).abs().max())))
        before = after
    return found


def spoil_next_gradient(engine):
    """Let this rank's next backward leave an infinite gradient in one element of one weight."""
    parameter = next(h for h in engine.held if h.spec.weight_decay).parameter

    def spoil(gradient):
        handle.remove()
        gradient = gradient.clone()
        gradient.view(-1)[0] = float("inf")
        return gradient

    handle = parameter.register_hook(spoil)


def expected():
    if not _EXPECTED:
        _EXPECTED.extend(run_ranks(train, 1, Case(steps=STEPS, batch=16), {})[0])
    return _EXPECTED


_EXPECTED = []


def assert_follows_fp32(case, fp16):
    ranks = run_ranks(train, case.world_size, case, fp16)
    for rank in ranks[1:]:
        assert [(loss, result) for loss, result, _ in rank] == [(x, r) for x, r, _ in ranks[0]]
    errors = [
        (abs(got - want) / want, abs(result.grad_norm - true.grad_norm) / true.grad_norm)
        for (got, result, _), (want, true, _) in zip(ranks[0], expected(), strict=True)
    ]
    loss, norm = (max(error) for error in zip(*errors, strict=True))
    print(f"{case!s:76} {'fixed' if fp16.get('loss_scale') else 'dynamic'}: "
          f"loss {loss:.1e}  norm {norm:.1e}")  # fmt: skip
    assert 0 < loss < 1e-4
    assert norm < 0.01
    return [result for _, result, _ in ranks[0]]


@pytest.mark.parametrize(
    ("mesh", "stage", "reduction"),
    [
        ((1, 1, 1), 0, "per_step"),
        ((1, 2, 1), 2, "per_microbatch"),
        ((1, 2, 2), 1, "per_step"),
        ((2, 2, 1), 3, "per_microbatch"),
    ],
    ids=str,
)
def test_it_follows_fp32(mesh, stage, reduction):
    """Over 12 steps; the dynamic scale doubles every four of them."""
    case = Case(mesh, zero_stage=stage, reduction=reduction, steps=STEPS, **SMALL)
    results = assert_follows_fp32(case, DYNAMIC)
    assert all(r.applied and not r.overflow for r in results)
    scales = [r.loss_scale for r in results]
    assert scales[0] == 2**12 and scales[-1] >= 2**14
    assert all(b in (a, 2 * a) for a, b in pairwise(scales))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "stage", "fixed"), list(product(MESHES, range(4), [False, True])), ids=str
)
def test_it_follows_fp32_in_full(mesh, stage, fixed):
    reduction = "per_microbatch" if fixed else "per_step"
    case = Case(mesh, zero_stage=stage, reduction=reduction, steps=STEPS, **SMALL)
    assert_follows_fp32(case, {"loss_scale": 512.0} if fixed else DYNAMIC)


@pytest.mark.parametrize(
    ("mesh", "stage", "offload"),
    [
        ((1, 2, 1), 0, "none"), ((2, 2, 1), 0, "cpu"), ((2, 2, 1), 1, "none"),
        ((1, 2, 2), 2, "cpu"), ((2, 2, 1), 3, "none"), ((2, 1, 2), 3, "cpu"),
    ],
    ids=str,
)  # fmt: skip
def test_an_overflow_on_one_rank_skips_the_step_on_all(mesh, stage, offload):
    case = Case(mesh, zero_stage=stage, offload=offload, steps=8, **SMALL)
    last = case.world_size - 1
    for found in run_ranks(train, case.world_size, case, DYNAMIC, (2, last)):
        results = [result for _, result, _ in found]
        assert [r.overflow for r in results] == [i == 2 for i in range(8)]
        assert [r.applied for r in results] == [i != 2 for i in range(8)]
        moves = [move for _, _, move in found]
        assert moves[2] == 0 and all(move > 0 for i, move in enumerate(moves) if i != 2)
        # Halved once, and doubled after four steps without overflow.
        scales = [r.loss_scale for r in results]
        assert scales == [2**12] * 3 + [2**11] * 5
        # The scale is gone from the norm, whatever it is.
        norms = [r.grad_norm for i, r in enumerate(results) if i != 2]
        assert max(norms) < 1.5 * min(norms)


def keep_skipped_gradients():
    fp16.forget_skipped_gradients = lambda optimizer: None


def test_without_forgetting_one_overflow_is_followed_by_many():
    case = Case(zero_stage=1, offload="cpu", steps=4, **SMALL)
    [found] = run_ranks(train, 1, case, DYNAMIC, (1, 0), keep_skipped_gradients)
    assert [result.overflow for _, result, _ in found] == [False, True, True, True]


def test_the_scale_of_the_next_steps_goes_up_again():
    case = Case((2, 1, 1), steps=10, **SMALL)
    first, second = run_ranks(train, 2, case, DYNAMIC, (1, 0))
    scales = [result.loss_scale for _, result, _ in first]
    assert scales == [result.loss_scale for _, result, _ in second]
    assert scales[1] == 2**12 and scales[2] == 2**11 and scales[-1] == 2**12


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 1)], ids=str)
def test_an_overflow_at_the_smallest_scale_stops_the_run(mesh):
    fp16 = {"initial_scale_power": 3, "min_loss_scale": 8.0, "hysteresis": 1}
    case = Case(mesh, steps=3, **SMALL)
    with pytest.raises(RankFailed, match=r"overflow even at fp16.min_loss_scale = 8; all ranks"):
        run_ranks(train, case.world_size, case, fp16, (1, 0))


def do_not_expect_scaled_gradients():
    fp16.expect_scaled_gradient = lambda engine: None


def test_without_saying_so_a_direct_backward_is_refused():
    with pytest.raises(RankFailed, match="Loss scaling is required"):
        run_ranks(train, 2, Case((2, 1, 1), steps=1, **SMALL), DYNAMIC, None,
                  do_not_expect_scaled_gradients)  # fmt: skip


def old_cpu():
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: False
    fp16.allow_fp16_on_cpu = lambda device: None


def test_without_leave_fp16_needs_a_cpu_that_has_it():
    with pytest.raises(RankFailed, match="fp16 is not supported on your device"):
        run_ranks(train, 1, Case(steps=1, **SMALL), DYNAMIC, None, old_cpu)


def grow_before_the_step():
    fp16.grow_scale_after_step = lambda optimizer: lambda: None


def test_without_waiting_a_growing_scale_halves_the_gradients():
    case = Case(steps=STEPS, **SMALL)
    [found] = run_ranks(train, 1, case, DYNAMIC, None, grow_before_the_step)
    ratios = [
        r.grad_norm / true.grad_norm
        for (_, r, _), (_, true, _) in zip(found, expected(), strict=True)
    ]
    assert sum(abs(ratio - 0.5) < 0.1 for ratio in ratios) >= 2  # it grew every fourth step


def test_the_weights_do_not_depend_on_the_scale():
    """Seen without clipping, and with Adam's steps proportional to the gradients."""
    plain = {"gradient_clipping": 0.0, "eps": 1.0, "lr": 1.0}
    for stage in (1, 3):
        case = Case(zero_stage=stage, steps=6, **SMALL)
        fp16 = {"initial_scale_power": 8, "loss_scale_window": 1}
        [grown] = run_ranks(train, 1, case, fp16, None, None, plain)
        [fixed] = run_ranks(train, 1, case, {"loss_scale": 256.0}, None, None, plain)
        assert grown[-1][1].loss_scale >= 2**10 and fixed[-1][1].loss_scale == 2**8
        for (_, a, move), (_, b, want) in zip(grown, fixed, strict=True):
            assert a.grad_norm == pytest.approx(b.grad_norm, rel=0.01)
            assert move == pytest.approx(want, rel=0.02)


def scale_each_rank_by_itself():
    """What would happen if ranks decided alone: DeepSpeed's agreement over the model is cut."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

    Stage3._model_parallel_all_reduce = lambda optimizer, tensor, op: None


def test_without_agreement_over_the_mesh_stages_part():
    """The one that saw the overflow skips its step, the other one takes it."""
    case = Case((2, 1, 1), tied=False, steps=3, **SMALL)
    first, second = run_ranks(train, 2, case, DYNAMIC, (1, 1), scale_each_rank_by_itself)
    assert [r.applied for _, r, _ in second] == [True, False, True]
    assert [r.applied for _, r, _ in first] == [True, True, True]


def test_outside_fp16_there_is_no_scale():
    [(_, result, _)] = run_ranks(train, 1, Case(steps=1, batch=16, precision="bf16"), {})[0]
    assert result.loss_scale == 1 and not result.overflow
    assert isinstance(Engine.loss_scale, property)
