"""ZeRO saves what it claims: bytes are counted storage by storage while real ranks train."""

from dataclasses import replace
from functools import cache

import pytest

from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case, Trainer
from tests.engine import storage_bytes
from tests.engine.storage_bytes import memory_bytes

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("cpu_adam")]

FP32 = 4
BUCKET = 2**12  # elements; DeepSpeed's own would hold every gradient of a toy model
CASE = Case(
    mesh=(1, 2, 1),
    steps=1,
    batch=4,
    microbatches=2,
    changes={"zero_optimization.reduce_bucket_size": BUCKET},
)
# Three transformer layers on each of two stages, as the others have on one.
PIPELINED = replace(CASE, mesh=(2, 2, 1), model={"num_hidden_layers": 6})
ONE_MICROBATCH = {"batch": 2, "microbatches": 1}
# Recomputation changes neither shards nor gradients: its run is that of `per_step`, too.
BY_MODE = {
    "per_step": replace(CASE, checkpointing="full", **ONE_MICROBATCH),
    "per_microbatch": replace(CASE, reduction="per_microbatch"),
}
OFFLOADED = replace(
    CASE, precision="bf16", offload="cpu", model={"num_hidden_layers": 1}, **ONE_MICROBATCH
)
BY_DEFAULT = [*BY_MODE.values(), OFFLOADED]


@cache
def measured(case):
    """What each rank found, with the other cases that are measured by default in one start."""
    if case not in BY_DEFAULT:
        return [row for (row,) in run_locally(measure_each, case.world_size, [case])]
    return dict(zip(BY_DEFAULT, zip(*by_default(), strict=True), strict=True))[case]


@cache
def by_default():
    return run_locally(measure_each, 2, BY_DEFAULT)


def measure_each(rank, cases):
    return [measure(case) for case in cases]


def measure(case):
    """What this rank holds after a batch, the peaks meanwhile, and the stage's sizes."""
    trainer = Trainer(case)
    engine = trainer.engine
    parameters = [h.parameter for h in trainer.engine.held]
    trainer.run()  # the first step records the order of the layers and makes Adam's moments
    [batch] = trainer.batches()
    layers = [layer for stage in trainer.stages.module.stages.values() for layer in stage]
    sizes = {
        "stage": sum(_numel(p) for p in parameters),
        "parameters": len(parameters),
        "largest": max(_numel(p) for p in parameters),
        "layer": max(sum(_numel(p) for p in layer.parameters()) for layer in layers),
    }
    if case.zero_stage == 3 and case.offload == "none":
        with storage_bytes.watching(engine.deepspeed, parameters) as peaks:
            trainer.executor.run(batch)
    else:
        peaks = None
        trainer.executor.run(batch)
    held = memory_bytes(engine)
    engine.step(1e-3)
    trainer.close()
    return sizes, held, peaks


def _numel(parameter):
    return getattr(parameter, "ds_numel", parameter.numel())


def assert_share(held, sizes, bytes_each, dp=2):
    """`held` is 1/dp of the stage, up to the padding of each parameter."""
    share = sizes["stage"] * bytes_each / dp
    padding = (sizes["parameters"] + 2) * bytes_each  # and the two placeholder elements
    assert share <= held <= share + padding, (held, share)


@pytest.mark.parametrize(
    "case",
    [
        BY_MODE["per_step"],
        *(
            pytest.param(
                replace(PIPELINED, schedule=schedule, checkpointing=checkpointing),
                marks=pytest.mark.slow,
            )
            for checkpointing in ("none", "full")
            for schedule in ("gpipe", "one_f_one_b")
        ),
    ],
    ids=str,
)
def test_at_most_two_layers_are_gathered(case):
    for rank, (sizes, _, peaks) in enumerate(measured(case)):
        layer = sizes["layer"]
        stage = sizes["stage"]
        print(
            f"rank {rank}: gathered at most {peaks.gathered_elements} elements, alive "
            f"{peaks.gathered_bytes / FP32:.0f}; a layer has {layer}, the stage {stage}"
        )
        assert 2 * layer < stage
        assert 0 < peaks.gathered_elements <= 2 * layer
        # What autograd saved lets go of the weights, too.
        assert peaks.gathered_bytes <= 2 * layer * FP32


def test_zero3_holds_shards_with_both_reductions():
    rows_by_mode = {mode: measured(case) for mode, case in BY_MODE.items()}
    for mode, ranks in rows_by_mode.items():
        for rank, (sizes, held, peaks) in enumerate(ranks):
            whole = sizes["stage"] * FP32
            print(f"{mode:15} rank {rank}: {held}, gradients at most {peaks.gradient_bytes}")
            assert_share(held["parameters"], sizes, FP32)
            assert_share(held["optimizer"], sizes, 2 * FP32)  # the weights are the masters
            assert_share(held["gradients"], sizes, FP32)  # after the reduction
            if mode == "per_step":
                assert peaks.gradient_bytes >= whole
            else:
                # The shards, and what waits for its bucket to be full.
                assert peaks.gradient_bytes <= whole / 2 + 2 * BUCKET * FP32
                assert peaks.gradient_bytes < 0.7 * whole
    # Over the data-parallel ranks the shards make up the stage.
    (sizes, a, _), (_, b, _) = rows_by_mode["per_step"]
    excess = a["parameters"] + b["parameters"] - sizes["stage"] * FP32
    assert 0 <= excess <= 2 * sizes["parameters"] * FP32


@pytest.mark.slow  # by default ZeRO-2, which holds the same bytes: test_zero_stages.py
@pytest.mark.parametrize("mode", BY_MODE)
def test_zero1_shards_the_optimizer(mode):
    case = replace(CASE, zero_stage=1, reduction=mode)
    for rank, (sizes, held, _) in enumerate(measured(case)):
        print(f"{mode:15} rank {rank}: {held}")
        # The stage's flat buffer is padded, not each parameter.
        assert sizes["stage"] * FP32 <= held["parameters"] <= (sizes["stage"] + 16) * FP32
        assert_share(held["optimizer"], sizes, 2 * FP32)
        # A parameter that lies across the cut keeps its whole gradient, one in each group.
        share = sizes["stage"] * FP32 / 2
        most = sizes["largest"] * FP32
        assert share <= held["gradients"] <= share + 2 * most


def test_masters_and_moments_stay_fp32_with_bf16_and_offload():
    """The masters and moments stay fp32; offload keeps the reduced gradients on the host, too."""
    for rank, (sizes, held, _) in enumerate(measured(OFFLOADED)):
        print(f"rank {rank}: {held}")
        assert_share(held["parameters"], sizes, 2)
        assert_share(held["optimizer"], sizes, 3 * FP32)
        assert_share(held["gradients"], sizes, 2 * FP32)
