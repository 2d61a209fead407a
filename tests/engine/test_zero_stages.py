"""ZeRO 0, 1, 2 and 3: the same numbers, and what each of them holds."""

from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import pytest
import torch

from parallel3d.engine.reduction import Reduction
from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case, Trainer, measure, train_on_rank
from tests.engine.storage_bytes import memory_bytes

pytestmark = pytest.mark.gloo

SMALL = {"batch": 4, "microbatches": 2, "model": {"num_hidden_layers": 1}}


@contextmanager
def without_the_mean():
    with patch.object(Reduction, "average_over_replicas", lambda *_: None):
        yield


@pytest.mark.slow  # parity with one process has ZeRO-0 on two replicas
def test_norm_is_wrong_without_the_mean_over_replicas():
    case = Case(mesh=(1, 2, 1), zero_stage=0, **SMALL)
    errors = measure(case, without_the_mean)
    assert errors.grad_norm > 1e-3, errors


def test_replicas_stay_bitwise_equal():
    case = Case(mesh=(1, 2, 1), zero_stage=0, precision="bf16", **SMALL)
    first, *others = [weights for _, _, weights in run_locally(train_on_rank, 2, case)]
    for weights in others:
        for (name, _, _, a), (_, _, _, b) in zip(first, weights, strict=True):
            assert torch.equal(a, b), name


def bytes_held(rank, case):
    """What a rank holds at the end of a pass, the most gradients meanwhile, and its parameters."""
    trainer = Trainer(case)
    engine = trainer.engine
    parameters = [h.parameter for h in trainer.engine.held]
    trainer.run()
    [batch] = trainer.batches()
    most = [0]
    backward = engine.backward

    def watched(*args, **stage):
        backward(*args, **stage)
        most.append(memory_bytes(engine)["gradients"])

    engine.backward = watched
    trainer.executor.run(batch)
    numel = sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
    return memory_bytes(engine), max(most), numel


@cache
def held_at(stage, reduction="auto"):
    case = Case(
        (1, 4, 1),
        zero_stage=stage,
        reduction=reduction,
        steps=1,
        batch=8,
        microbatches=2,
        model={"num_hidden_layers": 1},
        changes={"zero_optimization.reduce_bucket_size": 2**11},
    )
    return run_locally(bytes_held, 4, case)[0]


@pytest.mark.parametrize(
    # What stage 3 holds: test_zero3_memory.py.
    "stage",
    [2, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 3))],
)
def test_each_stage_holds_its_share(stage):
    """In units of the model's fp32 bytes, on 4 data-parallel ranks."""
    held, most, numel = held_at(stage)
    whole = 4 * numel
    share = {kind: n / whole for kind, n in held.items()} | {"gradients": most / whole}
    print(f"ZeRO-{stage}: " + ", ".join(f"{kind} {x:.2f}" for kind, x in share.items()))
    if stage == 3:
        assert share["parameters"] == pytest.approx(0.25, rel=0.1)
    else:
        assert share["parameters"] == pytest.approx(1, rel=0.01)
    if stage == 0:
        assert share["optimizer"] == pytest.approx(2, rel=0.01)
    else:
        assert share["optimizer"] == pytest.approx(0.5, rel=0.1)
    if stage == 2:
        assert share["gradients"] < 0.6
    else:
        assert share["gradients"] >= 1  # gathered up for the one reduction of the step


@pytest.mark.slow  # four runs on four ranks; what stage 2 holds is in the default run
def test_stages_1_and_2_hold_the_same_bytes():
    for reduction in ("per_step", "per_microbatch"):
        one, most_one, _ = held_at(1, reduction)
        two, most_two, _ = held_at(2, reduction)
        assert one == two and most_one == most_two
