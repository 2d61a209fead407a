"""The first hour with one GPU: a case for each kernel or stream that no CPU has, worst first.

    pytest -n 0 -m gpu_first                             # less than ten minutes
    PARALLEL3D_TRY_ON_CPU=1 pytest -m gpu_first          # these tests themselves, without a GPU

Each reports what it measured, as the other tests of this folder do.
"""

import json
import os
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import profile

from parallel3d.config import RunConfig, hardware
from parallel3d.mesh.groups import BACKEND
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.plan.memory.peak import per_rank
from parallel3d.plan.setting import Setting
from parallel3d.tensor import compiled, dealt, documents, pointwise, weight_gradients
from parallel3d.tensor.attention import kernel_of
from parallel3d.tensor.documents import attend_documents
from parallel3d.tensor.experts import grouped_product
from parallel3d.tensor.segments import Segments
from parallel3d.tensor.weight_gradients import sum_in_fp32
from parallel3d.train.assembly import assemble
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.measure import TOLERANCE
from tests.cases import Case, Trainer
from tests.checkpoint.drill import Run, prepared_config
from tests.gpu import here
from tests.gpu.test_device import SIZES, batch_of, config_of, counted_synchronisations
from tests.gpu.test_numbers import errors_of
from tests.tensor.test_compiled import LLAMA
from tests.verify.configs import MUON

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_first, here.needs_gpu]

ROOT = Path(__file__).parents[2]
BF16 = torch.bfloat16
IS_GPU = here.COUNT > 0


def on_device(*sizes, dtype=BF16):
    return torch.randn(*sizes, device=here.DEVICE, dtype=dtype)


def error(ours, theirs):
    """The largest difference, relative to the largest value."""
    difference = (ours.detach().float() - theirs.detach().float()).abs().max()
    return float(difference / theirs.detach().float().abs().max().clamp(min=1e-9))


def wait_for_device():
    if IS_GPU:
        torch.accelerator.synchronize()


def seconds_of(run, turns=10):
    for _ in range(3):
        run()
    wait_for_device()
    start = time.perf_counter()
    for _ in range(turns):
        run()
    wait_for_device()
    return (time.perf_counter() - start) / turns


def communicators_on_rank(rank):
    """The backend, the bytes that its groups take, and the names of its flight recorders."""
    os.environ.pop(BACKEND, None)  # one rank on a GPU has NCCL itself
    before = torch.cuda.mem_get_info()[0] if IS_GPU else 0
    mesh = Mesh()
    mesh.barrier()
    mesh.set_timeouts(300)
    ((half, one),) = mesh.messages.gather_floats([0.5, torch.ones((), device=mesh.device)])
    taken = before - torch.cuda.mem_get_info()[0] if IS_GPU else 0
    recorders = [name for name in dir(torch._C._distributed_c10d) if name.endswith("trace_json")]
    return mesh.backend, taken, recorders, (half, one)


def test_nccl_starts_and_records():
    ((backend, taken, recorders, numbers),) = run_locally(communicators_on_rank, 1)
    here.report(f"{backend}: groups of one rank take", f"{taken / 2**20:,.0f} MiB; {recorders}")
    assert backend == ("nccl" if IS_GPU else "gloo") and recorders
    assert numbers == (0.5, 1.0)


def test_weight_gradients_are_summed_in_fp32_inside_the_product():
    if IS_GPU:
        assert weight_gradients._has_sums(here.DEVICE, BF16), "each gradient takes a second pass"
    else:
        pytest.skip("a CPU has no such product")
    grad = on_device(8192, 4096)
    x = on_device(8192, 4096)
    total = torch.randn(4096, 4096, device=here.DEVICE)
    exact = total.double() + grad.double().t() @ x.double()
    apart = total.clone().add_(grad.t() @ x)
    within = sum_in_fp32(total.clone(), grad.t(), x)
    one = seconds_of(partial(sum_in_fp32, total, grad.t(), x))
    two = seconds_of(lambda: total.add_(grad.t() @ x))
    here.report("weight gradient in fp32", f"{1e3 * one:.2f} ms inside, {1e3 * two:.2f} apart")
    assert error(within, exact) < error(apart, exact) and one < two


@pytest.mark.parametrize("window", [None, 256])
def test_flex_attention_of_dealt_tokens_and_its_gradients(window):
    """Its backward is refused on CPUs; the places of documents change and compile nothing."""
    if not IS_GPU:
        pytest.skip("torch has no backward of FlexAttention here")
    seq = 1024
    mesh = Mesh()
    for _ in range(3):
        text = (torch.rand(2, seq) < 0.01).cumsum(-1)
        places = torch.arange(seq).view(1, 1, seq).expand(2, 1, seq)
        own = Segments.of(text, places, mesh.alone.group).on(here.DEVICE).dealt
        q, k, v = (on_device(2 * seq, heads, 64).requires_grad_() for heads in (8, 2, 2))
        grad = on_device(2 * seq, 8, 64)
        results = []
        for fused in (True, False):
            with patch.object(dealt, "is_fused", lambda *_, fused=fused: fused):
                y = dealt.attend_dealt(q, k, v, own, None, window, None)
            results.append([y, *torch.autograd.grad(y, (q, k, v), grad)])
        errors = [error(ours, plain) for ours, plain in zip(*results, strict=True)]
        assert max(errors) < 1e-2, errors
    mesh.close()
    assert compiled.counts().limits == 0


def test_grouped_products_in_bf16_with_empty_groups():
    ends = torch.tensor([100, 100, 300, 301, 700, 700, 999, 1000], device=here.DEVICE).int()
    rows = on_device(1000, 256)
    weight = on_device(8 * 512 * 256 + 1)[1:].view(8, 512, 256)  # not at an aligned address
    y = grouped_product(rows, weight.mT, ends)
    grad = on_device(1000, 512)
    grad_weight = grouped_product(grad.mT, rows, ends)
    bounds = [slice(*both) for both in pairwise([0, *ends.tolist()])]
    each = zip(bounds, weight, strict=True)
    assert error(y, torch.cat([rows[b].float() @ own.float().t() for b, own in each])) < 5e-3
    wanted = torch.stack([grad[b].float().t() @ rows[b].float() for b in bounds])
    assert error(grad_weight, wanted) < 5e-3 and not grad_weight.isnan().any()


def test_attention_has_a_fused_kernel():
    heads, kv_heads, seq, size = (32, 8, 8192, 128) if IS_GPU else (4, 2, 64, 16)
    shapes = [(1, seq, n, size) for n in (heads, kv_heads, kv_heads)]
    q, k, v = (on_device(*shape).transpose(1, 2).requires_grad_() for shape in shapes)
    grad = on_device(1, heads, seq, size)

    def step():
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return torch.autograd.grad(y, (q, k, v), grad)

    kernel = kernel_of(q, k, v, 0.0).name
    speed = 3.5 * 2 * heads * seq * seq * size / seconds_of(step, 5) / 1e12
    has_varlen = documents._kernel() is not None
    here.report("causal attention", f"{kernel}, {speed:,.0f} TFLOP/s; varlen {has_varlen}")
    assert kernel != "MATH"


@pytest.mark.parametrize(("window", "sinks"), [(None, False), (64, False), (64, True)], ids=str)
def test_documents_in_one_kernel_equal_each_by_itself(window, sinks):
    """The variable-length kernel, and what sinks use in its place; in bf16 with their gradients."""
    text = (torch.rand(2, 512) < 0.02).cumsum(-1)
    segments = Segments.of(text).on(here.DEVICE)
    shapes = [(2, 512, heads, 64) for heads in (8, 2, 2)]
    leaves = [on_device(*shape).requires_grad_() for shape in shapes]
    sink = on_device(8, dtype=torch.float32) if sinks else None
    results = []
    for dtype in (BF16, torch.float32):
        q, k, v = (leaf.to(dtype).transpose(1, 2) for leaf in leaves)
        scores = None if sink is None else sink.to(dtype)
        y = attend_documents(q, k, v, segments, 0.0, window=window, sinks=scores)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
    errors = [error(ours, plain) for ours, plain in zip(*results, strict=True)]
    here.report(f"documents, window {window}, sinks {sinks}", f"{max(errors):.1e} from fp32")
    assert max(errors) < 3e-2, errors


def forward_and_backward(function, args):
    function(*args).sum().backward()


def test_functions_between_products_are_faster_compiled():
    rows, size = (8192, 4096) if IS_GPU else (16, 64)
    x = on_device(1, rows, size).requires_grad_()
    gate_up = on_device(1, rows, 2 * size).requires_grad_()
    weight = torch.ones(size, device=here.DEVICE, dtype=BF16, requires_grad=True)
    for name, function, args in (
        ("rms_norm", pointwise.rms_norm, (x, weight, 1e-5)),
        ("swiglu", pointwise.swiglu, (gate_up,)),
    ):
        assert error(function.compiled(*args), function(*args)) < 2e-2
        runs = [
            lambda f=f, args=args: f(*args).sum().backward() for f in (function.compiled, function)
        ]
        fused, plain = map(seconds_of, runs)
        here.report(f"{name} compiled", f"{fused / plain:.2f} of {1e6 * plain:,.0f} us")
        assert not IS_GPU or fused < plain
    assert compiled.mode_on(here.DEVICE, "auto") == ("pointwise" if IS_GPU else "none")


def graphs_on_rank(rank, case):
    """What was compiled by the second step and by the last, and the largest norm."""
    trainer = Trainer(case)
    counts = []
    for step, batch in enumerate(trainer.batches()):
        trainer.executor.run(batch, step)
        norm = trainer.engine.step(trainer.lr).grad_norm
        counts.append(compiled.counts())
    trainer.close()
    return counts[1], counts[-1], norm


@pytest.mark.parametrize("mode", ["pointwise", "block"])
def test_compiled_runs_stay_compiled_with_documents(mode):
    changes = {"parallel3d.train.compile": mode, "parallel3d.data.isolate_documents": True}
    sizes = {"steps": 4, "batch": 24, "microbatches": 12, "precision": "bf16"}
    stage = 3 if mode == "pointwise" else 1
    case = Case(model=LLAMA, tied=False, zero_stage=stage, changes=changes, **sizes)
    ((early, late, norm),) = run_locally(graphs_on_rank, 1, case, timeout=200)
    here.report(f"compile {mode}, documents apart", f"{late.graphs} graphs, {late.breaks}")
    assert 0 < early.graphs == late.graphs and late.limits == 0 and norm < float("inf")


NUMBERS = {
    "bf16 llama, documents": ((1, 1, 1), {"model": "llama", "isolate": True, "precision": "bf16"}),
    "bf16 experts": ((1, 1, 1), {"model": "moe", "precision": "bf16"}),
    "ep 2": ((1, 2, 1), {"model": "moe", "changes": {"mesh": {"ep": 2}}}),
    "cp 2": ((1, 1, 2, 1), {"model": "llama"}),
    "weights per_step, overlapped": ((1, 2, 1), {"weights": "per_step", "overlap": True}),
    "weights per_pass": ((2, 2, 1), {"weights": "per_pass"}),
    "ZeRO-1 reduce-scatters": ((1, 2, 1), {"zero": 1, "precision": "bf16"}),
    "Muon": ((1, 2, 1), {"optimizer": MUON}),
    "activations on the host": ((1, 1, 1), {"on_host": "cpu", "model": "llama"}),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_match_plain_transformers(name, tmp_path):
    mesh, settings = NUMBERS[name]
    errors = errors_of(mesh, tmp_path, **settings)
    here.report(name, str(errors))
    precision = settings.get("precision", "fp32")
    assert errors.within(here.TOLERANCE if precision == "fp32" else TOLERANCE[precision]), errors


def steps_on_rank(rank, config):
    """Peak bytes of a step, its kernels, and the lines that wait for the device."""
    mesh = Mesh()
    parts = assemble(config, mesh)
    batch = batch_of(config, mesh)

    def step():
        parts.executor.run(batch, 0)
        parts.engine.step(1e-4)

    for _ in range(3):
        step()
    peak = 0
    if IS_GPU:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    with profile() as profiled:
        step()
    on_device = [e for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    waits = counted_synchronisations(mesh.device, step)
    parts.engine.close()
    return peak, len(on_device), waits


def test_activations_on_the_host_leave_the_device():
    """A host that runs ahead must not leave on the device what is on its way from it."""
    raw = config_of((1, 1, 1), **SIZES, zero=1).to_dict()
    raw["parallel3d"]["pipeline"]["offload_activations"] = "cpu"
    config = RunConfig.from_dict(raw).resolve(1).completed()
    ((peak, _, _),) = run_locally(steps_on_rank, 1, config, timeout=200)
    # Only devices have another memory than their host's.
    (plan,) = per_rank(Setting.from_config(config), hardware.load("H100-SXM5-80GB"))
    tensors = plan.total - plan.parts["margin"]
    here.report("peak with activations on the host", f"{peak >> 20:,} MiB, plan {tensors >> 20:,}")
    assert peak < 1.1 * tensors


# Files that may wait for the device in a step: for the norm, and in ours for what a step says.
MAY_WAIT = ("deepspeed/runtime/", "parallel3d/mesh/messages.py", "torch/")


def test_step_waits_in_few_places_and_launches_few_kernels():
    config = config_of((1, 1, 1), **SIZES, zero=1, precision="bf16")
    ((_, kernels, waits),) = run_locally(steps_on_rank, 1, config, timeout=200)
    passes = config.model.num_hidden_layers * config.num_microbatches
    here.report("kernels of a step", f"{kernels:,}; {kernels / passes:.0f} a layer and microbatch")
    here.report("lines that wait for the device", str(waits))
    assert all(any(part in place for part in MAY_WAIT) for place in waits), waits
    assert kernels < 200 * passes + 2_000


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    config = prepared_config(tmp_path_factory.mktemp("first"))
    config["parallel3d"]["train"] |= {"deterministic": True, "digest_every": 1}
    return config


def digests_of(run):
    lines = (run.folder / "digests.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_resumed_run_has_the_bits_of_an_unbroken_one(config):
    """The hardware is recognised, the engine tests itself, and states go through pinned memory."""
    whole = Run(config, "whole", (1, 1, 1))
    (end,) = whole.start(timeout=200)
    assert end.code == 0, end.log
    broken = Run(config, "broken", (1, 1, 1))
    for stop_after in (2, 0):
        broken.start(timeout=200, parallel3d__train__stop_after=stop_after or None)
    assert digests_of(broken) == digests_of(whole)
    for word in ("device  ", "kernel  ", "compile "):
        lines = [line for line in end.log.splitlines() if line.startswith(word)]
        here.report(word.strip(), "; ".join(lines))


def hang(rank, at):
    """Rank 1's device does not come out of an action; its host goes on."""
    doing = pulse.doing

    def do(text):
        doing(text)
        if rank == 1 and text.startswith(at):
            if IS_GPU:
                torch.cuda._sleep(2**40)
            else:
                time.sleep(1000)

    pulse.doing = do


def test_device_that_hangs_is_named(config):
    changes = {"parallel3d__train__timeout_seconds": 20, "zero_optimization__stage": 1}
    run = Run(config, "hangs", (2, 1, 1), **changes)
    ended = run.start("", partial(hang, at="1F1 of step 3"), timeout=200)
    output = "".join(end.log for end in ended)
    lines = [line for line in output.splitlines() if "1F1 of step 3" in line]
    here.report("a device that hangs", "; ".join(lines))
    assert len(lines) == 1 and lines[0].startswith("rank 1 "), output
    assert sorted((run.folder / "flight").glob("rank-*.json"))


def test_streams_share_no_tensor_without_a_wait():
    """torch's sanitizer names every tensor that two streams touch without a wait."""
    if not IS_GPU:
        pytest.skip("a CPU has no streams")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command += ["-m", "gpu_first", __file__, "-k", "numbers and (activations or overlapped)"]
    env = os.environ | {"TORCH_CUDA_SANITIZER": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout[-5000:]
