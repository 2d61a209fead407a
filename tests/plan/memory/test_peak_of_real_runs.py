"""The planner's memory against real runs: the peak bytes of all tensors, counted on every rank."""

import os
import tempfile

import pytest
import torch

from parallel3d.config import RunConfig
from parallel3d.engine.quirks.nvme import swapping_small_tensors
from parallel3d.mesh.mesh import Mesh
from parallel3d.pipeline.executor import Microbatch
from parallel3d.plan.memory.peak import per_rank
from parallel3d.plan.setting import Setting
from parallel3d.train.assembly import assemble
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.shrink import BLOCK, NO_THRESHOLDS
from tests.cases import any_weights
from tests.counting import Counting
from tests.engine.storage_bytes import memory_bytes

pytestmark = pytest.mark.gloo

# DeepSpeed's own thresholds but for one, which would keep a model this small whole for ever.
THRESHOLDS = {"stage3_param_persistence_threshold": 1000}
DEEP = {"hidden_size": 64, "num_hidden_layers": 6}  # with 8 samples a microbatch: activations
LLAMA = {"family": "llama", "num_attention_heads": 8, "num_key_value_heads": 2}
FULL = {"recompute": "full"}
FLAT = {"micro": 1, "seq": 32, "recompute": "full"}
ONE = {"schedule": "one_f_one_b"}
OFTEN = {"reduction": "per_microbatch"}
STEP = {"weights": "per_step"}
PASS = {"weights": "per_pass"}
BREADTH = {"schedule": "breadth_first", "v": 2}


def deep(**kinds):
    return {"micro": 8, "model": DEEP} | kinds


# By mesh, so that the ranks of one do not change the order in which another's modules are made.
CASES = {
    (1, 2, 1): [
        {
            "M": 2,
            "thresholds": THRESHOLDS,
            "offload": "cpu",
            "bucket": 2**18,
            "model": {"num_hidden_layers": 2},
            **OFTEN,
            **ONE,
            **FULL,
        }
    ],
    (2, 1, 1): [deep(M=2, schedule="interleaved", v=2, model=DEEP | {"num_hidden_layers": 4})],
}
MOE = {"family": "moe", "num_experts": 8, "moe_intermediate_size": 128}
OTHERS = {
    (1, 2, 1): [
        {"model": LLAMA, "micro": 4, "ema": {}},
        {"model": MOE, "micro": 4},
        {"model": MOE, "micro": 4, "ep": 2},
        {"model": MOE, "micro": 4, "ep": 2, "zero": 1},
    ]
}
BOTH = {
    (1, 2, 1): [
        {**PASS, **BREADTH, **OFTEN, "offload": "cpu+cpu", **FLAT},
        deep(recompute="layernorm+mlp_act"),
    ],
    (2, 1, 1): [deep(M=6, schedule="interleaved", v=2)],
}
SLOW = {
    (1, 1, 1): [
        {}, {"precision": "fp32"}, {"zero": 1, "M": 1, **FLAT},
        {"zero": 0, "M": 1, "bucket": 2**21, **FLAT},
        {"zero": 1, "M": 1, "bucket": 2**21, "precision": "fp32", **FLAT},
    ],
    (1, 2, 1): [
        {"precision": "fp32", **deep()}, {"zero": 1, **ONE, **FULL},
        {"zero": 1, "M": 1, "bucket": 2**21, **FLAT}, {"zero": 2, **ONE, **deep()},
        {"offload": "cpu", **OFTEN, **ONE}, STEP, {**STEP, **OFTEN},
        {**STEP, **OFTEN, "offload": "cpu", **FLAT}, {**PASS, **BREADTH, "precision": "fp32"},
        {**BREADTH, **FULL},
    ],
    (2, 1, 1): [deep(), deep(M=8, **ONE, **FULL), deep(zero=1, M=6, recompute="full:1", **ONE)],
    (1, 1, 2): [
        deep(sp=True, recompute="selective"), deep(sp=True, recompute="layernorm+mlp_act"),
        deep(sp=True, recompute="mlp", model=DEEP | LLAMA),
    ],
    (1, 4, 1): [
        {"zero": 1, "M": 1, "precision": "fp32", **OFTEN, **FLAT},
        {"shards": 2}, {"shards": 2, **PASS, **ONE}, {"shards": 2, "zero": 1, "precision": "fp32"},
    ],
    (2, 2, 1): [
        deep(M=6, **ONE),
        deep(M=6, **PASS, schedule="interleaved", v=2),
        deep(**PASS, **BREADTH),
    ],
}  # fmt: skip
MORE = {
    (1, 1, 1): [{"zero": 1, **FULL}, deep(**ONE)],
    (1, 2, 1): [
        {}, OFTEN, {"thresholds": THRESHOLDS}, {"thresholds": THRESHOLDS, **ONE, **deep()},
        {"thresholds": {}, **ONE, **FULL}, {"zero": 0}, {"zero": 0, **ONE, **FULL}, {"zero": 1},
        {"zero": 1, "offload": "cpu"}, {"zero": 2, "offload": "cpu"}, {"offload": "cpu+cpu"},
        {**STEP, "offload": "cpu+cpu", **FULL}, {**STEP, "thresholds": THRESHOLDS, **ONE, **FULL},
        {"offload": "cpu", "precision": "fp32", **deep()}, {"offload": "nvme", **ONE},
        {"zero": 2, "precision": "fp16", **ONE, **deep()},
    ],
    (2, 1, 1): [
        ONE, deep(M=8, **ONE), deep(M=6, schedule="v_shape", v=2),
        deep(M=6, schedule="interleaved", v=3), deep(M=6, **BREADTH),
        deep(zero=1, M=6, recompute="mlp", schedule="zero_bubble"),
    ],
    (1, 1, 2): [{}, {"sp": True}, {"sp": True, **FULL}, {"model": LLAMA, "micro": 4, **ONE}],
    (4, 1, 1): [deep(M=8, **ONE)],
    (2, 2, 1): [deep(M=6, **ONE, **OFTEN), deep(zero=2, schedule="v_shape", v=2)],
    (2, 1, 2): [deep(sp=True)],
    (1, 2, 2): [deep(zero=1)],
}  # fmt: skip


def config_of(
    mesh,
    zero=3,
    offload="none",
    schedule="gpipe",
    v=1,
    M=4,
    micro=2,
    seq=64,
    reduction="auto",
    recompute="none",
    sp=False,
    precision="bf16",
    model=None,
    thresholds=NO_THRESHOLDS,
    bucket=2**16,
    weights="per_microbatch",
    ep=1,
    shards=None,
    ema=None,
):
    """What a user would write, resolved."""
    pp, dp, tp = mesh
    optimizer, _, parameters = offload.partition("+")
    sizes = {
        "family": "gpt",
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 512,
        "max_position_embeddings": 64,
    }
    raw = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": M,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": zero,
            "offload_optimizer": {"device": optimizer},
            "offload_param": {"device": parameters or "none"},
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": 2**16,
            **thresholds,
        },
        "parallel3d": {
            "mesh": {
                "pp": pp,
                "dp": dp,
                "tp": tp,
                "ep": ep,
                "sequence_parallel": sp,
                "dp_shards": shards,
            },
            "pipeline": {
                "schedule": schedule,
                "stages_per_rank": v,
                "gradient_reduction": reduction,
                "weights": weights,
                "activation_checkpointing": recompute,
            },
            "model": sizes | (model or {}),
            "data": {"sequence_length": seq, "vocab_size": 512},
            "train": {"steps": 2, "ema": ema},
            "plan": {"ep_imbalance": 1.0},  # ranks are compared one by one
        },
    }
    if optimizer == "nvme":
        raw["zero_optimization"]["offload_optimizer"]["nvme_path"] = tempfile.gettempdir()
        raw["aio"] = {"block_size": BLOCK}
    if precision != "fp32":
        raw[precision] = {"enabled": True}
    return RunConfig.from_dict(raw).resolve(pp * dp * tp)


def measure(rank, raws):
    """For each config: the peak of the second step, and what the engine holds after it."""
    return [
        measured(RunConfig.from_dict(raw).resolve(int(os.environ["WORLD_SIZE"]))) for raw in raws
    ]


def measured(config):
    mesh = Mesh(**config.mesh.groups)
    length = config.data.sequence_length
    samples = config.micro_batch_size
    with Counting() as counting, swapping_small_tensors(2 * BLOCK):
        with any_weights():
            parts = assemble(config, mesh)
        for step in range(2):  # in the first Adam's moments are made
            counting.start()
            batch = []
            for _ in range(config.num_microbatches):
                tokens = torch.randint(config.model.vocab_size, (samples, length))
                batch.append(Microbatch(tokens, tokens.clone()))
            parts.executor.run(batch, step)
            parts.engine.step(1e-3)
    held = memory_bytes(parts.engine)
    mesh.barrier()
    parts.engine.close()
    return counting.peak, held


def errors_of(mesh, cases):
    """Prints predicted and measured, rank by rank; returns the error of each coordinate's fullest.

    The parts of which the engine knows the size are compared one by one.
    """
    pp, dp, tp = mesh
    configs = [config_of(mesh, **case) for case in cases]
    ranks = run_locally(measure, pp * dp * tp, [c.to_dict() for c in configs])
    fullest = {}  # peak and prediction of the fullest rank
    for i, (config, case) in enumerate(zip(configs, cases, strict=True)):
        planned = per_rank(Setting.from_config(config))
        print(f"\n{pp}x{dp}x{tp} {case}")
        for rank, results in enumerate(ranks):
            peak, held = results[i]
            memory = planned[rank // (dp * tp)]
            predicted = memory.total + memory.host  # on a CPU both are the same memory
            coordinate = str(case), rank // (dp * tp)
            fullest[coordinate] = max(fullest.get(coordinate, (0, 0)), (peak, predicted))
            parts = ", ".join(f"{name} {n}" for name, n in memory.parts.items() if n)
            print(f"rank {rank}: {predicted} for {peak}, {predicted / peak - 1:+.1%}")
            print(f"        {parts}, host {memory.host}")
            print(f"        held after the step: {held}")
            assert memory.parts["buffers"] >= held["buckets"]
            weights = memory.parts["weights"]
            if config.zero_optimization.offload_param.device == "none":
                assert weights == pytest.approx(held["parameters"], rel=0.02)
            if config.zero_optimization.offload_optimizer.device == "none":
                assert memory.parts["optimizer"] == pytest.approx(held["optimizer"], rel=0.02)
            else:
                assert memory.host >= 0.98 * held["optimizer"]
    return {where: predicted / peak - 1 for where, (peak, predicted) in fullest.items()}


def test_counted_memory():
    with Counting() as counting:
        x = torch.zeros(1000)
        y = x[:500] * 2  # a view is no storage of its own
        assert counting.bytes == 4000 + 2000
        del x
        assert counting.bytes == 2000
        counting.start()
        y.add_(1)
        z = torch.stack([y, y, y])
        del y
        assert (counting.bytes, counting.peak) == (6000, 8000)
        del z
    assert counting.bytes == 0


def rows(cases, limit, *marks):
    return [pytest.param(mesh, of_mesh, limit, marks=marks) for mesh, of_mesh in cases.items()]


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(
    ("mesh", "cases", "limit"),
    [
        *rows(CASES, 0.06),
        *rows(BOTH, 0.06, pytest.mark.slow),
        *rows(OTHERS, 0.1, pytest.mark.slow),  # tests/models/test_layer_memory.py has the family
        *rows(SLOW, 0.06, pytest.mark.slow),
        *rows(MORE, 0.1, pytest.mark.slow),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else "",
)
def test_peaks_are_predicted(mesh, cases, limit):
    errors = errors_of(mesh, cases)
    assert len(errors) == len(cases) * mesh[0]
    assert not {where: error for where, error in errors.items() if abs(error) > limit}
