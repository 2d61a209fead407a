"""A run that is killed and started again on the same mesh has the bits of one that never was.

Loss and gradient norm of every step, and weights and moments in the end; with dropout and
activation checkpointing, in the middle of an epoch.
"""

import random

import pytest

from tests.checkpoint.drill import (
    LENGTH,
    Run,
    check_died,
    check_resumed,
    check_same,
    prepared_config,
)

pytestmark = pytest.mark.drill

STEPS = 5
MESHES = {"1x2x1": (1, 2, 1), "2x1x1": (2, 1, 1), "1x1x2": (1, 1, 2), "2x2x2": (2, 2, 2)}
ZERO = {
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero3": {"zero_optimization": {"stage": 3}},
    "offload": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
}
# By default test_kill.py has kills at chosen points, and tests/engine/test_states.py every way of
# keeping state; tests/launch/test_restart.py stops a run and goes on with it.
TABLE = [pytest.param(zero, mesh, marks=pytest.mark.slow) for zero in ZERO for mesh in MESHES]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    config = prepared_config(tmp_path_factory.mktemp("resume"))
    config["parallel3d"]["train"]["steps"] = STEPS
    return config


def check(config, name, mesh, **settings):
    """Kill a seeded rank as it begins its fourth step; the same command goes on exactly."""
    unbroken = Run(config, f"{name}-unbroken", mesh, **settings)
    ended = unbroken.start()
    assert [end.code for end in ended] == [0] * len(ended), ended[0].log
    run = Run(config, f"{name}-killed", mesh, **settings)
    rank = random.Random(name).randrange(run.num_ranks)
    check_died(run.start(f"kill trainer.step 4 {rank}"), rank)
    newest = max(run.complete_steps())
    # The save after the third step may be done or not; that after the second was waited for.
    every = run.config["parallel3d"]["checkpoint"]["every"]
    assert newest in ((2, 3) if every == 1 else (2,))
    check_resumed(run.start(), newest)
    check_same(run, unbroken)
    return run


def synchronous(every=2):
    """Settings with which the third step is lost, and done again."""
    return {"parallel3d__checkpoint__asynchronous": False, "parallel3d__checkpoint__every": every}


@pytest.mark.parametrize(("zero", "mesh"), TABLE)
def test_resume_after_a_kill_is_bitwise_exact(config, cpu_adam, zero, mesh):
    settings = ZERO[zero] | (synchronous() if mesh in ("2x1x1", "1x1x2") else {})
    check(config, f"{zero}-{mesh}", MESHES[mesh], **settings)


FP16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
LLAMA = {
    "family": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
}
VARIANTS = {
    "bf16": ((1, 2, 1), {"bf16": {"enabled": True}}),
    "bf16 offload": ((2, 1, 2), ZERO["offload"] | {"bf16": {"enabled": True}}),
    "bf16 zero1": ((2, 2, 1), ZERO["zero1"] | {"bf16": {"enabled": True}}),
    "fp16": ((2, 1, 1), {"fp16": FP16}),
    "llama with sequence parallelism": (
        (2, 1, 2),
        {"parallel3d__model": LLAMA, "parallel3d__mesh__sequence_parallel": True},
    ),
    "evaluation": (
        (1, 2, 1),
        {"parallel3d__train__evaluate_every": 1, "parallel3d__train__evaluate_samples": 40},
    ),
    "zero0": ((1, 2, 1), {"zero_optimization": {"stage": 0}}),
    "zero2": ((2, 2, 1), {"zero_optimization": {"stage": 2}}),
    "parameters offloaded": (
        (1, 2, 1),
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
            }
        },
    ),
    "several stages a rank": (
        (2, 1, 1),
        {
            "parallel3d__model__num_hidden_layers": 4,
            "parallel3d__pipeline__schedule": "interleaved",
            "parallel3d__pipeline__stages_per_rank": 2,
        },
    ),
    "selective recomputation": (
        (1, 1, 2),
        {"parallel3d__pipeline__activation_checkpointing": "selective"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_resume_is_bitwise_exact_with_other_settings(config, cpu_adam, variant):
    mesh, settings = VARIANTS[variant]
    run = check(config, variant.replace(" ", "-"), mesh, **settings)
    if "fp16" in settings:
        scales = [line["loss_scale"] for line in run.lines]
        assert len(set(scales[2:])) > 1, "the scale does not move after the kill"
