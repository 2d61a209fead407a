"""Measure computes, memory and communication of this machine's ranks, on CPU or GPU."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from parallel3d.mesh.mesh import Mesh, Peers
from parallel3d.mesh.transfer import all_gather_single, reduce_scatter_single
from parallel3d.model import optimizers

_ATTENTIONS = (  # batch, heads, seq, head size
    (2, 4, 64, 64),
    (2, 4, 128, 64),
    (2, 8, 256, 64),
    (1, 8, 512, 64),
    (2, 8, 1024, 64),
    (2, 16, 2048, 128),
)


Operator = Callable[[], object]
"""An operator to time, with its inputs."""
Links = dict[str, list[tuple[int, float]]]
"""Collective, or "send" -> rows (gathered bytes, seconds of the slowest rank)."""


@dataclass(frozen=True)
class Effort:
    """Length and size of the measurements."""

    seconds: float = 0.06  # per figure
    longest: float = 0.12  # the most seconds of an operator
    largest: int = 8192  # the most rows of an operator
    adam_params: int = 4_000_000
    copied_bytes: int = 64 * 2**20
    steps: int = 6  # per small training run
    small_runs: int = 100  # the most small training runs


def set_threads(mesh: Mesh) -> None:
    """Set the number of threads as in training: OMP_NUM_THREADS, else a share of the cores."""
    share = (os.cpu_count() or 1) // mesh.local_size
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", share))))


def clock_of(mesh: Mesh) -> Callable[[], float]:
    """Return the clock for computes: wall time, or the CPU time of a single thread."""
    single = mesh.device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if single else time.perf_counter


def slowest(mesh: Mesh, seconds: float) -> float:
    """Return the largest of all ranks' seconds, the same on every rank. Collective."""
    return max(row[0] for row in mesh.messages.gather_floats([seconds]))


class Timer:
    """Times operators on a device, on all ranks of the mesh at once."""

    def __init__(self, mesh: Mesh, effort: Effort) -> None:
        self.mesh = mesh
        self.device = mesh.device
        self.effort = effort
        self.clock = clock_of(mesh)

    def seconds(self, run: Operator) -> float:
        """Return the shortest time of a `run`, from `effort.seconds` of runs and at least 3."""
        run()
        self.mesh.barrier()
        first = self._once(run, 1)
        # Many runs are queued at once on a GPU, as in training: batches last 2 ms or more.
        number = max(1, min(50, int(0.002 / max(first, 1e-7))))
        timings: list[float] = []
        until = time.perf_counter() + self.effort.seconds
        while len(timings) < 3 or time.perf_counter() < until:
            timings.append(self._once(run, number))
        return min(timings)

    def _once(self, run: Operator, number: int) -> float:
        backend = torch.get_device_module(self.device)
        backend.synchronize()
        start = self.clock()
        for _ in range(number):
            run()
        backend.synchronize()
        return (self.clock() - start) / number


def measure_device(mesh: Mesh, effort: Effort) -> dict[str, Any]:
    """Return this rank's figures as JSON. Collective: all ranks measure together.

    - "matmul": rows (m, k, n, seconds) by dtype.
    - "attention": rows (batch, heads, seq, head size, seconds forward, seconds backward).
    - "traffic": rows (operator, bytes, seconds).
    - "bandwidth", "adam_params", "host_adam_params", "host_copy": rates per second.
    """
    from parallel3d.engine.op_builds import load_cpu_adam  # it loads DeepSpeed

    timer = Timer(mesh, effort)
    products = {}
    name, memory_bytes = describe(mesh)
    for dtype, kind in (
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
    ):
        with suppress(RuntimeError):  # the device has no products of this type
            products[dtype] = list(_matmuls(timer, kind))
    figures = {
        "device_name": name,
        "memory_bytes": memory_bytes,
        "matmul": products,
        "attention": list(_attention(timer)),
        "traffic": list(_traffic(timer)),
        "bandwidth": _bandwidth(timer),
        "adam_params": _adam(timer, mesh.device, cpu_adam=False),
    }
    built = load_cpu_adam(mesh, partial(print, file=sys.stderr))
    host_adam_params = _adam(timer, torch.device("cpu"), cpu_adam=built)
    return figures | {"host_adam_params": host_adam_params, "host_copy": _host_copy(timer)}


def describe(mesh: Mesh) -> tuple[str, float]:
    """Return the name of a device, and the bytes of memory of one rank."""
    if mesh.device.type == "cpu":
        return "", psutil.virtual_memory().total / mesh.local_size
    backend = torch.get_device_module(mesh.device)
    total = backend.get_device_properties(mesh.device).total_memory
    return str(backend.get_device_name(mesh.device)), float(total)


def _matmuls(timer: Timer, dtype: torch.dtype) -> Iterator[tuple[int, int, int, float]]:
    size = 64
    seconds = 0.0
    while size <= timer.effort.largest and 8 * seconds <= timer.effort.longest:
        for shape in ((size, size, size), (size, 4 * size, size), (2 * size, size // 2, 4 * size)):
            seconds = timer.seconds(_product(*shape, dtype, timer.device))
            seconds = slowest(timer.mesh, seconds)
            yield *shape, seconds
        size *= 2


def _product(
    m: int, k: int, n: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor]:
    """Return a linear layer's product. It cycles through several weights to defeat caches."""
    x = torch.randn(m, k, device=device).to(dtype)
    count = max(1, min(16, 2**24 // (k * n)))
    weights = cycle([torch.randn(n, k, device=device).to(dtype) for _ in range(count)])
    return lambda: x @ next(weights).t()


def _attention(timer: Timer) -> Iterator[tuple[int, int, int, int, float, float]]:
    dtype = torch.float32 if timer.device.type == "cpu" else torch.bfloat16
    seconds = 0.0
    for shape in _ATTENTIONS:
        if seconds > timer.effort.longest / 8 or shape[2] > timer.effort.largest:
            return
        q, k, v, grad = (torch.randn(shape, device=timer.device, dtype=dtype) for _ in range(4))
        for x in (q, k, v):
            x.requires_grad_()
        forward = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        there = timer.seconds(forward)
        both = timer.seconds(partial(_there_and_back, forward, (q, k, v), grad))
        seconds = slowest(timer.mesh, both)
        yield *shape, there, max(both - there, 0.1 * there)


def _there_and_back(
    forward: Callable[[], Tensor], inputs: tuple[Tensor, ...], grad: Tensor
) -> object:
    return torch.autograd.grad(forward(), inputs, grad)


def _traffic(timer: Timer) -> Iterator[tuple[str, int, float]]:
    for tokens in (64, 256, 1024, 4096):
        if 2 * tokens > timer.effort.largest:
            return
        x, y = (torch.randn(tokens, 512, device=timer.device) for _ in range(2))
        weight = torch.ones(512, device=timer.device)
        size = x.numel() * 4
        norm = partial(F.layer_norm, x, (512,), weight, weight)
        yield "add", 3 * size, timer.seconds(partial(torch.add, x, y))
        yield "norm", 2 * size, timer.seconds(norm)
        yield "gelu", 2 * size, timer.seconds(partial(F.gelu, x, approximate="tanh"))


def _bandwidth(timer: Timer) -> float:
    source = torch.ones(timer.effort.copied_bytes // 4, device=timer.device)
    target = torch.empty_like(source)
    return 2 * timer.effort.copied_bytes / timer.seconds(lambda: target.copy_(source))


def _adam(timer: Timer, device: torch.device, cpu_adam: bool) -> float:
    count = timer.effort.adam_params * (1 if device.type == "cpu" else 16)
    parameter = torch.zeros(count, device=device, requires_grad=True)
    parameter.grad = torch.full_like(parameter, 1e-3)
    groups = [{"params": [parameter], "weight_decay": 0.1}]
    adamw = optimizers.load("adamw")
    params = adamw.Params.model_validate({"lr": 1e-3, "betas": (0.9, 0.95)})
    optimizer = adamw.make(groups, params, device=device, cpu_adam=cpu_adam)
    return count / timer.seconds(optimizer.step)


def _host_copy(timer: Timer) -> float:
    """Return the bytes per second of the slower direction."""
    size = timer.effort.copied_bytes
    on_gpu = timer.device.type != "cpu"
    host = torch.ones(size // 4, pin_memory=on_gpu)
    device = torch.empty(size // 4, device=timer.device)
    pairs = ((device, host), (host, device))
    return size / max(timer.seconds(partial(a.copy_, b, non_blocking=on_gpu)) for a, b in pairs)


def measure_links(mesh: Mesh, effort: Effort) -> Links:
    """Return the seconds of each collective and of a send. Collective."""
    results: Links = {}
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "send"):
        rows = results[kind] = []
        for size in (4 * 1024 * 4**i for i in range(8)):  # 4 KiB to 64 MiB when gathered
            run = collective(kind, size, mesh.world, mesh.device)
            rows.append((size, min(max(row) for row in timings(run, mesh, effort))))
            # The fit of bandwidth and latency needs two sizes, however slow the machine is.
            if len(rows) > 1 and 4 * rows[-1][1] > effort.longest:
                break
    return results


def timings(run: Operator, mesh: Mesh, effort: Effort) -> list[list[float]]:
    """Return the seconds of `run` on every rank, for each of at least 3 times. Collective."""
    run()
    rows: list[list[float]] = []
    # The slowest rank's seconds are the same on each rank, so that all stop together.
    while len(rows) < 3 or (sum(map(max, rows)) < effort.seconds and len(rows) < 20):
        mesh.barrier()
        torch.get_device_module(mesh.device).synchronize()
        start = time.perf_counter()
        run()
        torch.get_device_module(mesh.device).synchronize()
        rows.append([row[0] for row in mesh.messages.gather_floats([time.perf_counter() - start])])
    return rows


def collective(kind: str, size: int, peers: Peers, device: torch.device) -> Operator:
    """Return the collective of `peers` over a gathered tensor of `size` bytes.

    "send" is a message from the first of the peers to the second.
    """
    group, ranks, coord = peers
    part = torch.ones(max(1, size // 4 // ranks), device=device)
    gathered = torch.ones(len(part) * ranks, device=device)
    if kind == "all_reduce":
        return partial(dist.all_reduce, gathered, group=group)
    if kind == "all_gather":
        return partial(all_gather_single, gathered, part, group=group)
    if kind == "reduce_scatter":
        return partial(reduce_scatter_single, part, gathered, group=group)
    if coord == 0:
        return partial(dist.send, gathered, group=group, group_dst=1)
    if coord == 1:
        return partial(dist.recv, gathered, group=group, group_src=0)
    return lambda: None
