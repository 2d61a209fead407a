"""Measurement of what one rank of this machine computes and moves, on CPU or GPU."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from math import inf
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.engine.operators import load_cpu_adam, make_optimizer
from parallel3d.mesh.mesh import Mesh

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Batch, heads, seq, head size.
_ATTENTIONS = (
    (2, 4, 64, 64),
    (2, 4, 128, 64),
    (2, 8, 256, 64),
    (1, 8, 512, 64),
    (2, 8, 1024, 64),
    (2, 16, 2048, 128),
)
_BATCH = 0.002  # seconds of operators that are timed as one
_HOPELESS = 0.05  # seconds of a product of 256 x 256: no such type in this device's hardware


@dataclass(frozen=True)
class Effort:
    """How long and how large the measurements are.

    `seconds` for each figure; operators up to the `longest` (in seconds) and the `largest` (in
    rows); Adam on so many parameters; `steps` of so many small training runs.
    """

    seconds: float = 0.06
    longest: float = 0.12
    largest: int = 8192
    adam_params: int = 4_000_000
    copied_bytes: int = 64 * 2**20
    steps: int = 6
    small_runs: int = 100


QUICK = Effort(0.002, 0.005, 128, 50_000, 2**20, 1, 2)  # enough to see that everything works


@dataclass
class Measured:
    """Measurements of one rank; each list has rows that end in seconds."""

    device_name: str = ""
    memory_bytes: float = 0.0
    threads: int = 1
    matmul: dict[str, list[tuple[int, int, int, float]]] = field(default_factory=dict)
    """(m, k, n, seconds) by dtype."""
    attention: list[tuple[int, int, int, int, float, float]] = field(default_factory=list)
    """(batch, heads, seq, head size, seconds forward, seconds backward)."""
    traffic: list[tuple[str, int, float]] = field(default_factory=list)
    """(operator, bytes read and written, seconds)."""
    bandwidth: float = 0.0
    """Bytes a second of a large copy, read and written."""
    adam_params: float = 0.0
    """Parameters a second of the device's Adam."""
    host_adam_params: float = 0.0
    """Parameters a second of the CPU's Adam."""
    host_adam: str = ""
    """Which Adam that is."""
    host_copy: float = 0.0
    """Bytes a second between host and device."""
    left_out: list[str] = field(default_factory=list)
    """What could not be measured, with the reason."""


def set_threads(mesh: Mesh) -> None:
    """Set the threads that training would have: OMP_NUM_THREADS, else a share of the cores."""
    share = (os.cpu_count() or 1) // mesh.local_size
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", share))))


def clock_of(mesh: Mesh) -> Callable[[], float]:
    """The clock that times computing on a device; on one thread, that thread's own CPU time."""
    single = mesh.device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if single else time.perf_counter


class Timer:
    """A timer of operators on a device, for all ranks of the mesh at once."""

    def __init__(self, mesh: Mesh, effort: Effort) -> None:
        self.mesh, self.device, self.effort = mesh, mesh.device, effort
        self.clock = clock_of(mesh)

    def seconds(self, run: Callable[[], object]) -> float:
        """The least time of one `run`, over `effort.seconds` and at least 3 times.

        What else the machine does only adds to it; the other ranks run all the while.
        """
        run()
        self.mesh.barrier()
        first = self._once(run, 1)
        # A GPU is given many at once: training does not wait for each either.
        number = max(1, min(50, int(_BATCH / max(first, 1e-7))))
        taken: list[float] = []
        until = time.perf_counter() + self.effort.seconds
        while len(taken) < 3 or time.perf_counter() < until:
            taken.append(self._once(run, number))
        return min(taken)

    def _once(self, run: Callable[[], object], number: int) -> float:
        backend = torch.get_device_module(self.device)
        backend.synchronize()
        start = self.clock()
        for _ in range(number):
            run()
        backend.synchronize()
        return (self.clock() - start) / number


def measure_device(mesh: Mesh, effort: Effort, say: Callable[[str], None]) -> dict[str, Any]:
    """Measurements of this rank's device, as a Measured in JSON.

    Collective: the ranks measure the same things at the same time, since they may share a machine.
    """
    timer, result = Timer(mesh, effort), Measured()
    result.device_name, result.memory_bytes = describe(mesh)
    result.threads = torch.get_num_threads()
    for name, dtype in DTYPES.items():
        say(f"matrix products in {name}")
        try:
            result.matmul[name] = list(_matmuls(timer, dtype))
        except RuntimeError as error:
            result.left_out.append(f"matrix products in {name}: {_first_line(error)}")
    say("attention and memory-bound operators")
    result.attention = list(_attention(timer))
    result.traffic = list(_traffic(timer))
    result.bandwidth = _bandwidth(timer)
    say("Adam on the device and on the host")
    result.adam_params = _adam(timer, mesh.device, cpu_adam=False)
    result.host_adam, result.host_adam_params = _host_adam(timer, say)
    result.host_copy = _host_copy(timer)
    return asdict(result)


def describe(mesh: Mesh) -> tuple[str, float]:
    """The name of a device, and the bytes of memory that one rank has."""
    if mesh.device.type == "cpu":
        return "", psutil.virtual_memory().total / mesh.local_size
    backend = torch.get_device_module(mesh.device)
    total = backend.get_device_properties(mesh.device).total_memory
    return str(backend.get_device_name(mesh.device)), float(total)


def _matmuls(timer: Timer, dtype: torch.dtype) -> Iterator[tuple[int, int, int, float]]:
    probe = timer.seconds(_product(256, 256, 256, dtype, timer.device))
    # Every rank must come to the same answer.
    if max(row[0] for row in timer.mesh.gather_floats([probe])) > _HOPELESS:
        raise RuntimeError(f"256 x 256 x 256 takes {1e3 * probe:.0f} ms")
    size, seconds = 64, 0.0
    while size <= timer.effort.largest and 8 * seconds <= timer.effort.longest:
        for shape in ((size, size, size), (size, 4 * size, size), (2 * size, size // 2, 4 * size)):
            seconds = timer.seconds(_product(*shape, dtype, timer.device))
            seconds = max(row[0] for row in timer.mesh.gather_floats([seconds]))
            yield *shape, seconds
        size *= 2


def _product(
    m: int, k: int, n: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor]:
    """A product as a linear layer has it; its weights take turns, so that no cache holds them."""
    weights = max(1, min(16, 2**24 // (k * n)))
    x = torch.randn(m, k, device=device).to(dtype)
    ws = [torch.randn(n, k, device=device).to(dtype) for _ in range(weights)]
    turn = [0]

    def run() -> Tensor:
        turn[0] = (turn[0] + 1) % weights
        return x @ ws[turn[0]].t()

    return run


def _attention(timer: Timer) -> Iterator[tuple[int, int, int, int, float, float]]:
    dtype = torch.float32 if timer.device.type == "cpu" else torch.bfloat16
    seconds = 0.0
    for batch, heads, seq, size in _ATTENTIONS:
        if seconds > timer.effort.longest / 8 or seq > timer.effort.largest:
            return
        shape = (batch, heads, seq, size)
        q, k, v = (torch.randn(shape, device=timer.device, dtype=dtype) for _ in range(3))
        for x in (q, k, v):
            x.requires_grad_()
        grad = torch.randn_like(q)

        def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def both(
            run: Callable[[], Tensor] = forward,
            inputs: tuple[Tensor, ...] = (q, k, v),
            grad: Tensor = grad,
        ) -> object:
            return torch.autograd.grad(run(), inputs, grad)

        there, there_and_back = timer.seconds(forward), timer.seconds(both)
        seconds = max(row[0] for row in timer.mesh.gather_floats([there_and_back]))
        yield *shape, there, max(there_and_back - there, 0.1 * there)


def _traffic(timer: Timer) -> Iterator[tuple[str, int, float]]:
    for tokens in (64, 256, 1024, 4096):
        if 2 * tokens > timer.effort.largest:
            return
        x, y = (torch.randn(tokens, 512, device=timer.device) for _ in range(2))
        weight, size = torch.ones(512, device=timer.device), x.numel() * 4
        add, gelu = partial(torch.add, x, y), partial(F.gelu, x, approximate="tanh")
        norm = partial(F.layer_norm, x, (512,), weight, weight)
        yield "add", 3 * size, timer.seconds(add)
        yield "norm", 2 * size, timer.seconds(norm)
        yield "gelu", 2 * size, timer.seconds(gelu)


def _bandwidth(timer: Timer) -> float:
    source = torch.ones(timer.effort.copied_bytes // 4, device=timer.device)
    target = torch.empty_like(source)
    return 2 * timer.effort.copied_bytes / timer.seconds(lambda: target.copy_(source))


def _adam(timer: Timer, device: torch.device, cpu_adam: bool) -> float:
    count = timer.effort.adam_params * (1 if device.type == "cpu" else 16)
    parameter = torch.zeros(count, device=device, requires_grad=True)
    parameter.grad = torch.full_like(parameter, 1e-3)
    groups = [{"params": [parameter], "weight_decay": 0.1}]
    optimizer = make_optimizer(
        groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, cpu_adam=cpu_adam, device=device
    )
    return count / timer.seconds(optimizer.step)


def _host_adam(timer: Timer, say: Callable[[str], None]) -> tuple[str, float]:
    built = load_cpu_adam(timer.mesh, say)
    name = "DeepSpeed's CPU Adam" if built else "torch's AdamW on the CPU"
    return name, _adam(timer, torch.device("cpu"), cpu_adam=built)


def _host_copy(timer: Timer) -> float:
    """The slower of the two directions."""
    size = timer.effort.copied_bytes
    on_gpu = timer.device.type != "cpu"
    host = torch.ones(size // 4, pin_memory=on_gpu)
    device = torch.empty(size // 4, device=timer.device)
    slowest = -inf
    for target, source in ((device, host), (host, device)):

        def copy(target: Tensor = target, source: Tensor = source) -> Tensor:
            return target.copy_(source, non_blocking=on_gpu)

        slowest = max(slowest, timer.seconds(copy))
    return size / slowest


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0]
