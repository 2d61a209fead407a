"""Where the host waits for the device in a step, as DeepSpeed runs beside an accelerator."""

import gc

import pytest

from parallel3d.verify.local_ranks import run_locally
from tests.asynchronous import asynchronous
from tests.cases import Case, Trainer

pytestmark = pytest.mark.gloo

MICROBATCHES = 2
OURS = {("tolist", "parallel3d/mesh/messages.py:gather_floats"): 1}  # all that a step says, once
ZERO = "deepspeed/runtime/zero/"
INVALID = "bool", "deepspeed/runtime/utils.py:is_invalid_grad_norm"
FETCH = "event.synchronize", f"{ZERO}partitioned_param_coordinator.py:_fetch_sub_module_impl"
REDUCED = "stream.synchronize", f"{ZERO}stage3.py:independent_gradient_partition_epilogue"
BUCKET = "event.synchronize", f"{ZERO}stage3.py:__reduce_and_partition_ipg_grads"
# Each step gathers what is below the persistence threshold, and waits for the device.
KEPT = "device.synchronize", f"{ZERO}partition_parameters.py:_allgather_params_coalesced"
OVERFLOW_12 = "item", f"{ZERO}stage_1_and_2.py:has_overflow"
OVERFLOW_3 = "item", f"{ZERO}stage3.py:has_overflow"
# ZeRO-3 lets the host be two gathers ahead. This model's modules gather so often a microbatch:
# and with their forwards run again
GATHERS = 34
AGAIN = 10
ONCE = {"reduction": "per_step"}
OFTEN = {"reduction": "per_microbatch"}
FULL = {"checkpointing": "full"}

# The norm is looked at before it is used: once, and once for each of two groups at ZeRO 0 to 2.
NORM_12 = {INVALID: 3}
NORM_3 = {INVALID: 1}
IN_PASSES_3 = {FETCH: GATHERS * MICROBATCHES, BUCKET: 1, REDUCED: 1}
# Weights that the program gathers need no wait of DeepSpeed's, and none is kept whole.
GATHERED = {"weights": "per_step", "thresholds": True}
# Under ZeRO-1 a whole run counts its waits by default: tests/train/test_host_reads.py.
CASES = {
    "zero3": (3, ONCE, IN_PASSES_3, NORM_3),
    "zero3 gathered": (3, GATHERED, {BUCKET: 1, REDUCED: 1}, NORM_3),
}
MORE = {
    "zero1": (1, ONCE, {}, NORM_12),
    "zero0": (0, ONCE, {}, NORM_12),
    "zero1 often": (1, OFTEN, {}, NORM_12),
    "zero2": (2, ONCE, {}, NORM_12),
    "zero2 often": (2, OFTEN, {}, NORM_12),
    "zero2 bf16": (2, {"precision": "bf16"}, {}, NORM_12),
    "zero2 fp16": (2, {"precision": "fp16"}, {}, {OVERFLOW_12: 1, **NORM_12}),
    "zero3 often": (
        3,
        OFTEN,
        {FETCH: GATHERS * MICROBATCHES, REDUCED: MICROBATCHES, BUCKET: MICROBATCHES},
        NORM_3,
    ),
    "zero3 full": (
        3,
        FULL,
        {FETCH: (GATHERS + AGAIN) * MICROBATCHES, BUCKET: 1, REDUCED: 1},
        NORM_3,
    ),
    "zero3 small kept": (3, {"thresholds": True}, {BUCKET: 1, REDUCED: 1}, NORM_3 | {KEPT: 1}),
    "zero3 per_pass": (3, GATHERED | {"weights": "per_pass"}, {BUCKET: 1, REDUCED: 1}, NORM_3),
    "zero3 bf16": (3, {"precision": "bf16"}, IN_PASSES_3, NORM_3),
    "zero3 fp16": (3, {"precision": "fp16"}, IN_PASSES_3, {OVERFLOW_3: 1, **NORM_3}),
}


def steps_on_rank(rank, cases):
    """Return for each case the losses and norms of its steps, and the waits of the last one.

    DeepSpeed times the steps after the third.
    """
    with asynchronous() as waits:
        return [steps_of(case, waits.take) for case in cases]


def plain_steps_on_rank(rank, case):
    """Return the losses and norms of a case on the CPU as it is."""
    values, no_waits = steps_of(case, dict)
    assert no_waits == ({}, {}, {})
    return values


def steps_of(case, take):
    trainer = Trainer(case)
    values = []
    gc.collect()  # the engine of the case before waits for the device when it is freed
    for step, batch in enumerate(trainer.batches()):
        take()
        loss = trainer.executor.run(batch, step)
        in_passes = take()
        done = trainer.engine.step(trainer.lr)
        in_step = take()
        rows = trainer.mesh.messages.gather_floats([loss, done.norm])
        values += [value for row in rows for value in row]
    waited = in_passes, in_step, take()
    trainer.close()
    return values, waited


def case_of(stage, kinds):
    return Case(
        mesh=(1, 2, 1),
        schedule="one_f_one_b",
        microbatches=MICROBATCHES,
        batch=4,
        steps=4,
        zero_stage=stage,
        model={"num_hidden_layers": 1},
        **kinds,
    )


def check(table):
    """Check the waits of each case, and its numbers against the first one's; return these."""
    cases = [case_of(*row[:2]) for row in table.values()]
    ranks = run_locally(steps_on_rank, 2, cases)
    for results in ranks:
        first, _ = results[0]
        for (name, row), (values, waited) in zip(table.items(), results, strict=True):
            _, kinds, in_passes, in_step = row
            assert waited == (in_passes, in_step, OURS), name
            is_half = kinds.get("precision", "fp32") != "fp32"
            assert values == pytest.approx(first, rel=1e-2 if is_half else 1e-5), name
    return [results[0][0] for results in ranks]


def test_host_waits_only_where_zero_must_and_once_per_step():
    check(CASES)


@pytest.mark.slow
def test_host_waits_only_where_zero_must_in_full():
    first = check(MORE)
    on_plain_cpu = run_locally(plain_steps_on_rank, 2, case_of(*next(iter(MORE.values()))[:2]))
    for values, plain_values in zip(first, on_plain_cpu, strict=True):
        assert values == pytest.approx(plain_values, rel=1e-5)
