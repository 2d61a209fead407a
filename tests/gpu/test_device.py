"""What a device does with a step: memory, host synchronisations, kernels, clocks, speed."""

import statistics
import time
import warnings

import pytest
import torch

from benchmarks.step import ours, plain
from parallel3d import models
from parallel3d.base import reader
from parallel3d.config import RunConfig
from parallel3d.mesh.device import set_numerics
from parallel3d.mesh.mesh import Mesh
from parallel3d.pipeline.executor import Microbatch
from parallel3d.plan.memory.peak import per_rank
from parallel3d.plan.setting import Setting
from parallel3d.tensor.attention import kernel_of
from parallel3d.tensor.documents import in_one_kernel
from parallel3d.train.assembly import assemble
from parallel3d.verify.local_ranks import run_locally
from tests.gpu import here
from tests.plan.memory.test_peak_of_real_runs import config_of

pytestmark = pytest.mark.gpu

# Large enough on a GPU that what torch rounds up is little of it.
MEDIUM = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "vocab_size": 32768,
    "max_position_embeddings": 1024,
}
SMALL = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 512}
SIZES = {"model": MEDIUM, "seq": 1024, "micro": 2} if here.COUNT else {"model": SMALL, "seq": 32}


def batch_of(config, mesh):
    text = torch.randint(config.model.vocab_size, (1 + config.data.sequence_length,))
    text = text.expand(config.micro_batch_size, -1).to(mesh.device)
    one = Microbatch(text[:, :-1].contiguous(), text[:, 1:].contiguous())
    return [one] * config.num_microbatches


def free_bytes(rank):
    """Of the device that this rank will have, or has; the first question makes CUDA's context."""
    return torch.cuda.mem_get_info(rank % here.COUNT)[0] if here.COUNT else 0


def look_at_steps(rank, config):
    """Peak and reserved bytes, what else is gone of the device, synchronisations of a step."""
    before = free_bytes(rank)
    mesh = Mesh(pp=config.mesh.pp, dp=config.mesh.dp, tp=config.mesh.tp)
    parts = assemble(config, mesh)
    batch = batch_of(config, mesh)

    def step():
        parts.executor.run(batch, 0)
        parts.engine.step(1e-4)

    for _ in range(3):
        step()
    figures = {"peak": 0, "reserved": 0, "outside": 0, "synchronisations": {}}
    mesh.barrier()
    start = time.perf_counter()
    step()
    mesh.barrier()
    figures["seconds"] = time.perf_counter() - start
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        figures["peak"] = torch.cuda.max_memory_allocated()
        figures["reserved"] = torch.cuda.max_memory_reserved()
        figures["outside"] = before - free_bytes(rank) - torch.cuda.memory_reserved()
    figures["synchronisations"] = counted_synchronisations(mesh.device, step)
    mesh.barrier()
    parts.engine.close()
    return figures


def counted_synchronisations(device, step):
    """How often the host waited for the device in a step, by the line that did."""
    if device.type != "cuda":
        step()
        return {}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        step()
        torch.cuda.set_sync_debug_mode("default")
    places = [f"{w.filename.rpartition('site-packages/')[2]}:{w.lineno}" for w in heard]
    return {place: places.count(place) for place in sorted(set(places))}


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        ((1, 1, 1), {"zero": 1}),
        ((1, 1, 1), {"zero": 3, "recompute": "full"}),
        ((1, 1, 1), {"zero": 1, "recompute": "mlp"}),
        ((2, 1, 1), {"zero": 1, "schedule": "one_f_one_b"}),
        ((1, 2, 1), {"zero": 3, "schedule": "one_f_one_b"}),
        ((1, 1, 2), {"zero": 2, "sp": True, "recompute": "selective"}),
    ],
    ids=str,
)
def test_peak_memory_matches_the_plan(mesh, settings):
    """The planner's peak within 10 % on every rank; no synchronisation inside the passes."""
    pp, dp, tp = mesh
    here.enough(pp * dp * tp)
    config = config_of(mesh, **SIZES, **settings)
    expected = [memory.total for memory in per_rank(Setting.from_config(config))]
    rows = run_locally(look_at_steps, pp * dp * tp, config)
    name = f"{pp}x{dp}x{tp} " + " ".join(f"{k}={v}" for k, v in settings.items())
    for rank, row in enumerate(rows):
        # dp and tp ranks of one stage hold the same.
        plan = expected[rank // (dp * tp)]
        if not here.COUNT:
            continue
        mib = {k: f"{row[k] / 2**20:,.0f}" for k in ("peak", "reserved", "outside")}
        here.report(
            f"{name}, rank {rank}",
            f"plan {plan / 2**20:,.0f} MiB, peak {mib['peak']}, reserved {mib['reserved']}, "
            f"outside torch {mib['outside']}; synchronisations {row['synchronisations']}",
        )
        assert row["peak"] == pytest.approx(plan, rel=0.1)


@here.needs_gpu
def test_shipped_configs_use_fused_attention_kernels():
    """Torch's choice for one microbatch of each config, at the mesh it ships with."""
    unfused = []
    for path in sorted(reader.CONFIGS.glob("*.json")):
        config = RunConfig.from_json(str(path))
        if config.is_planned:
            continue
        model = config.model
        seq = config.data.sequence_length
        tp = config.mesh.tp
        heads = model.num_attention_heads
        kv_heads = getattr(model, "kv_heads", heads)
        size = getattr(model, "head_size", model.hidden_size // heads)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.precision, torch.float32)
        q = torch.empty(1, heads // tp, seq, size, dtype=dtype, device="cuda")
        k = torch.empty(1, kv_heads // tp, seq, size, dtype=dtype, device="cuda")
        v = torch.empty_like(k)
        dropout = getattr(model, "attn_pdrop", 0.0)
        isolated = config.data.isolate_documents
        if isolated and in_one_kernel(q, dropout):
            kernel = "VARLEN"
        else:
            kernel = kernel_of(q, k, v, dropout).name
        here.report(f"attention of {path.stem}{', documents apart' if isolated else ''}", kernel)
        if kernel == "MATH":
            unfused.append(path.stem)
    assert not unfused


def trained_twice(rank, config):
    """The losses of two runs of a few steps from the same weights, as bits."""
    set_numerics(tf32=False, deterministic=True)
    curves = []
    for _ in range(2):
        mesh = Mesh(pp=config.mesh.pp, dp=config.mesh.dp, tp=config.mesh.tp)
        torch.manual_seed(0)
        parts = assemble(config, mesh, seed=0)
        batch = batch_of(config, mesh)
        losses = []
        for step in range(4):
            losses.append(parts.executor.run(batch, step))
            parts.engine.step(1e-3)
        curves.append([float(loss).hex() for loss in losses])
        mesh.barrier()
        parts.engine.close()
    return curves


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), (1, 1, 2)], ids=str)
def test_deterministic_runs_have_the_same_bits(sizes):
    ranks = sizes[0] * sizes[1] * sizes[2]
    here.enough(ranks)
    for first, second in run_locally(trained_twice, ranks, config_of(sizes, **SIZES)):
        assert first == second


def test_speed_is_near_plain_transformers():
    """Steps in turns; the ratio goes into the table. On a GPU all of it costs less than 15 %."""
    mesh = Mesh()
    config = models.config_class("gpt")(family="gpt", **SIZES["model"])
    seq = SIZES["seq"]
    text = torch.randint(config.vocab_size, (4, 2, seq + 1), device=mesh.device)
    batch = [Microbatch(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in text]
    steps = {"plain": plain(config, batch)}
    steps |= {f"ZeRO-{stage}": ours(config, batch, mesh, {"stage": stage}) for stage in (1, 3)}
    times = {name: [] for name in steps}
    for turn in range(8):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if mesh.device.type != "cpu":
                torch.accelerator.synchronize()
            if turn >= 3:
                times[name].append(time.perf_counter() - start)
    mesh.close()
    median = {name: statistics.median(taken) for name, taken in times.items()}
    for name, seconds in median.items():
        tokens = text[..., 1:].numel() / seconds
        ratio = f"{median['plain'] / seconds:.2f} of plain transformers"
        here.report(f"{name}, fp32, one device", f"{tokens:,.0f} tokens/s, {ratio}")
    if here.COUNT:
        assert median["ZeRO-1"] < 1.15 * median["plain"]
