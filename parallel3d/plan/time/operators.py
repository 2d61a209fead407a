"""Seconds of matrix products, attention and memory-bound work on one device.

A roofline model: an operator takes the longer of the times of its FLOPs and of its bytes, at an
efficiency that depends on its size (`Curves`), plus the time of its launch.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, NoReturn

from parallel3d.base.errors import UnknownFigure
from parallel3d.base.section import Problem, raise_if_any
from parallel3d.config.hardware import Hardware, Kernels
from parallel3d.model.spec import Attention, MatMul, Work
from parallel3d.plan.setting import BYTES, Precision, Software


@dataclass(frozen=True)
class Curves:
    """The fraction of each hardware figure that programs reach, and overheads in seconds.

    One set, fitted on published runs, serves all devices and programs. benchmarks/fit_curves.py
    writes it to curves.json; docs/planner/validation.md shows its output. A machine that was
    measured with `parallel3d plan --calibrate` has its own set.
    """

    datasheet: float = 0.82
    """The highest FLOP/s of a matrix product over the data sheet's peak, if it is not measured."""
    matmul: float = 0.9
    """Fraction of the highest measured FLOP/s that a very large product reaches."""
    eager: float = 1.0
    """Rate of products in a program of eager kernels, relative to one of tuned kernels."""
    compiled: float = 1.0
    """Rate of products in a compiled program, relative to one of tuned kernels."""
    wave: float = 1.2e6
    """Output elements whose time is lost at the end of a product: devices compute tiles in waves,
    and the last wave is not full."""
    depth: float = 100.0
    """Inner size (k) of a product that costs as much as starting its tiles."""
    fp8: float = 0.92
    """Fraction of the data sheet's speedup of fp8 over bf16 that products reach, whose inputs are
    turned into fp8 before."""
    flash: float = 0.6
    """Fraction of the highest product rate that flash attention reaches with large heads."""
    flash_head: float = 32.0
    """Head size at which flash attention reaches half of `flash`."""
    flash_backward: float = 0.85
    """Rate of flash attention's backward over that of its forward."""
    ported: float = 0.65
    """Rate of an attention kernel for older chips over that of a kernel written for the chip."""
    traffic: float = 0.75
    """Fraction of the memory bandwidth that memory-bound operators reach."""
    fused: float = 0.5
    """Fraction of their traffic that remains if the program fuses consecutive ones."""
    optimizer: float = 0.75
    """Fraction of the memory bandwidth that the device's optimizer reaches."""
    link: float = 0.75
    """Fraction of a link's bandwidth inside a node that collectives reach."""
    network: float = 0.75
    """Fraction of the network's bandwidth that collectives reach between two nodes."""
    congestion: float = 0.03
    """Relative increase of the network's time with each doubling of the number of nodes."""
    latency: float = 1.0
    """Factor on the latencies in the description of the hardware."""
    overlap: float = 0.7
    """Fraction of a transfer that is hidden if it overlaps with longer computes."""
    tensor_overlap: float = 0.7
    """Fraction of a tensor-parallel collective that matrix products hide."""
    host: float = 0.8
    """Fraction of the bandwidth to host and NVMe that offload reaches."""
    overhead_per_operator: float = 6e-6
    """Seconds to start an operator."""
    overhead_per_collective: float = 2e-5
    """Seconds to start a collective inside a node and to synchronise its ranks, beside the steps of
    its ring."""
    overhead_per_crossing: float = 5e-5
    """The same for a collective whose ranks are on several nodes."""
    overhead_per_launch: float = 2e-4
    """Host seconds to launch a collective inside a layer, with its copies and waits: some twenty
    calls of 10 us each. They are part of the layer's host time, see `host_overlap`."""
    overhead_per_layer: float = 3e-4
    """Host seconds per layer and forward; a backward takes twice as long (eager PyTorch at toy
    sizes was measured at 0.33 ms, without kernel launches). A separate device computes meanwhile;
    `host_overlap` says how well the two overlap."""
    overhead_per_experts: float = 1e-3
    """Host seconds of a forward through experts that other ranks own, if the host waits for the
    number of their rows: it launches a hundred kernels of 10 us each (router, sorting, exchanges,
    products) while none are queued, so that they hide behind nothing. A backward takes twice as
    long."""
    host_overlap: float = 3.0
    """Exponent p of (host^p + device^p)^(1/p), the seconds of a layer's pass on a separate device.
    1 adds the two, and infinity leaves the longer one: some kernels of a layer wait for the host
    even if its others do not."""
    overhead_per_action: float = 1e-4
    """Host seconds per forward or backward of a stage."""
    overhead_per_gather: float = 1e-5
    """Host seconds per parameter that ZeRO-3 gathers or reduces."""
    overhead_per_message: float = 0.0
    """Additional host seconds if the parameter's shards are on several ranks. Only between
    processes on cores, which synchronise slowly; a device's network hides it."""
    overhead_per_param: float = 1e-6
    """Host seconds per parameter and step."""
    overhead_per_step: float = 5e-3
    """Host seconds per step."""


FILE = Path(__file__).with_name("curves.json")
_MAY_BE_0 = ("over", "tensor_overlap", "congestion")  # overheads and overlap


@lru_cache(maxsize=1)
def fitted() -> Curves:
    """Return the curves fitted on all published runs, the planner's default."""
    return Curves(**json.loads(FILE.read_text(encoding="utf-8"))["all"]["curves"])


def curves_for(hardware: Hardware) -> Curves:
    """Return the hardware's own curves, else the fitted ones; ConfigError for invalid ones."""
    known = Curves.__dataclass_fields__
    own = hardware.curves or {}
    rule = "must be a curve with a number above 0"
    problems = []
    for name, value in own.items():
        is_wrong_zero = value == 0 and not name.startswith(_MAY_BE_0)
        if name not in known or value < 0 or is_wrong_zero:
            problems.append(Problem(f"curves.{name}", value, rule, "measure it again"))
    raise_if_any(problems, f"the hardware {hardware.name}")
    return Curves(**own) if own else fitted()


@dataclass(eq=False)
class Machine:
    """The hardware and program that run operators; equal machines are one object."""

    hardware: Hardware
    software: Software
    curves: Curves


_machines: dict[tuple[int, Software, Curves], Machine] = {}


def machine_of(hardware: Hardware, software: Software, curves: Curves) -> Machine:
    """Return the machine of this hardware, software and curves; equal ones are one object."""
    # Machine keeps the hardware alive, so that no other object can get its id.
    return _machines.setdefault(
        (id(hardware), software, curves), Machine(hardware, software, curves)
    )


KERNELS = 8  # memory-bound operators of a layer
# Reads and writes of the attention scores in memory, apart from the products: masked softmax reads
# and writes them, dropout reads and writes them (with a mask of one byte).
SCORE_PASSES = 4.5
SCORE_PASSES_BACKWARD = 5.5  # dropout as in the forward; softmax reads two and writes one
TILE_BYTES = 16
OFF_TILES = 0.73  # speed with head sizes of 108, 150 and 450 relative to their neighbours
# Elements of 16 bits that turning an input into fp8 moves: one is read, and a row-wise and a
# column-wise one of 8 bits are written (Transformer Engine: the backward needs the latter).
QUANTIZED = 2
FLASH_BACKWARD_FLOPS = 2.5  # five products instead of two: arXiv:2307.08691, section 4.1


def matmul_flops(hardware: Hardware, precision: Precision, curves: Curves) -> float:
    """Return the highest FLOP/s of a matrix product: measured, or a fraction of the data sheet's.

    A missing bf16 or fp16 figure is replaced by the other's. fp8 is bf16 times the data sheet's
    ratio of the two. Raises UnknownFigure if no figure is known.
    """
    if precision == "fp8" and (eight := hardware.peak("fp8")) and (full := hardware.peak("bf16")):
        return matmul_flops(hardware, "bf16", curves) * eight / full * curves.fp8
    for dtype in {"bf16": ("bf16", "fp16"), "fp16": ("fp16", "bf16")}.get(precision, (precision,)):
        if measured := hardware.matmul_flops.get(dtype):
            return measured.value
        if stated := hardware.peak_flops.get(dtype):  # not `peak`: a measurement comes first
            return stated.value * curves.datasheet
    known = {*hardware.peak_flops, *hardware.matmul_flops} - {"fp8"}  # in which nothing is trained
    other = f"use one of {', '.join(sorted(known))}, or " if known else ""
    raise UnknownFigure(
        f"hardware {hardware.name}: no FLOP/s is known for {precision}; {other}add "
        f'peak_flops["{precision}"] to the file of this hardware'
    )


def fits_tiles(size: int, precision: Precision, hardware: Hardware) -> bool:
    """Return True if rows of `size` elements are whole tiles of the device's tensor cores.

    NVIDIA's guide to matrix products: dims must be multiples of 16 bytes (arXiv:2401.14489,
    section VI).
    """
    return hardware.cores is not None or size * BYTES[precision] % TILE_BYTES == 0


def kernel_speed(hardware: Hardware, kernels: Kernels, curves: Curves) -> float:
    """Return the rate of products in a program of such kernels; that of tuned ones is 1."""
    if measured := hardware.kernels.get(kernels):
        return measured.value
    return {"eager": curves.eager, "compiled": curves.compiled, "tuned": 1.0}[kernels]


def matmul_seconds(
    product: MatMul, precision: Precision, hardware: Hardware, curves: Curves
) -> float:
    """Return the seconds of a matrix product: the longer of its FLOPs and its bytes.

    The FLOPs include the partial last wave of tiles and the start of each tile.
    """
    m, k, n, batch = product
    flops = product.flops * (1 + curves.wave / (m * n * batch)) * (1 + curves.depth / k)
    rate = matmul_flops(hardware, precision, curves) * curves.matmul
    if not (fits_tiles(k, precision, hardware) and fits_tiles(n, precision, hardware)):
        rate *= OFF_TILES
    inputs = 1 if precision == "fp8" else BYTES[precision]
    moved = batch * (inputs * k * (m + n) + BYTES[precision] * m * n)
    return max(flops / rate, moved / bandwidth_of(hardware)) + curves.overhead_per_operator


def backward_products(product: MatMul) -> tuple[MatMul, MatMul]:
    """Return the two products of a product's backward: gradients of its input and its weight."""
    m, k, n, batch = product
    return MatMul(m, n, k, batch), MatMul(k, m, n, batch)


def attention_seconds(
    attention: Attention,
    precision: Precision,
    hardware: Hardware,
    curves: Curves,
    software: Software,
    backward: bool = False,
) -> float:
    """Return the seconds of softmax attention with the kernel of `software`.

    - "flash": FLOPs at a rate of their own; half of them if the kernel skips the masked half.
    - "classic": two batched products, and traffic of the scores.
    """
    half: Precision = "bf16" if precision == "fp8" else precision  # scores are not in fp8
    batch, heads, _, seq, size, _ = attention
    keys = attention.keys
    if software.attention == "classic":
        of_scores = MatMul(seq, size, keys, batch * heads)
        of_values = MatMul(seq, keys, size, batch * heads)
        products: tuple[MatMul, ...] = (of_scores, of_values)
        passes = SCORE_PASSES
        if backward:
            products = (*backward_products(of_scores), *backward_products(of_values))
            passes = SCORE_PASSES_BACKWARD
        scores = int(passes * batch * heads * seq * keys)
        seconds = sum(matmul_seconds(product, half, hardware, curves) for product in products)
        return traffic_seconds(scores, half, hardware, curves) + seconds
    flops = attention.flops * (1 - attention.hidden if software.causal_skips else 1.0)
    rate = matmul_flops(hardware, half, curves) * curves.flash * size / (size + curves.flash_head)
    if "fp8" in hardware.peak_flops and not software.hopper:
        rate *= curves.ported
    if not fits_tiles(size, half, hardware):
        rate *= OFF_TILES
    if backward:
        flops = flops * FLASH_BACKWARD_FLOPS
        rate = rate * curves.flash_backward
    moved = BYTES[half] * (2 * batch * seq * size) * (heads + attention.kv_heads)
    return max(flops / rate, moved / bandwidth_of(hardware)) + curves.overhead_per_operator


def traffic_seconds(
    elements: int, precision: Precision, hardware: Hardware, curves: Curves
) -> float:
    """Return the seconds of memory-bound operators that read and write `elements` in total."""
    return elements * BYTES[precision] / (bandwidth_of(hardware) * curves.traffic)


class WorkSeconds(NamedTuple):
    """Seconds of a Work's operators, without its collectives."""

    matmuls: float
    attention: float
    traffic: float


def work_seconds(
    work: Work,
    precision: Precision,
    hardware: Hardware,
    curves: Curves,
    software: Software,
    devices: int = 1,
    backward: bool = False,
) -> WorkSeconds:
    """Return the seconds of a Work or of its backward, on one of a mesh of `devices`."""
    products: tuple[MatMul, ...] = work.matmuls
    if backward:
        products = tuple(p for product in products for p in backward_products(product))
    matmuls = sum(matmul_seconds(p, precision, hardware, curves) for p in products)
    matmuls /= kernel_speed(hardware, software.kernels, curves)
    attention = traffic = quantizing = 0.0
    if precision == "fp8":
        inputs = sum(p.batch * p.m * (p.n if backward else p.k) for p in work.matmuls)
        quantizing = traffic_seconds(QUANTIZED * inputs, precision, hardware, curves)
    if work.attention:
        attention = attention_seconds(
            work.attention, precision, hardware, curves, software, backward
        )
    if work.traffic:
        traffic = KERNELS * curves.overhead_per_operator
        # Few programs fuse the loss: each of its fp32 copies of the logits goes through memory.
        fuses = software.kernels != "eager" and hardware.cores is None
        left = curves.fused if fuses and work.attention else 1.0
        traffic += left * traffic_seconds(work.traffic, precision, hardware, curves)
        traffic *= 2 if backward else 1
    return WorkSeconds(
        matmuls * hardware.slowdown("matmul", devices),
        attention * hardware.slowdown("attention", devices),
        (traffic + quantizing) * hardware.slowdown("traffic", devices),
    )


def bandwidth_of(hardware: Hardware) -> float:
    """Return a device's memory bandwidth in bytes per second; ConfigError if it is unknown."""
    return (hardware.memory_bandwidth or refuse(hardware, "memory_bandwidth")).value


def refuse(hardware: Hardware, key: str, otherwise: str = "") -> NoReturn:
    """Raise UnknownFigure for a figure that the hardware's description lacks.

    - `otherwise`: what needs no such figure, in words.
    """
    raise UnknownFigure(
        f"hardware {hardware.name}: its {key} is not known; add it to its file"
        + (f", or {otherwise}" if otherwise else "")
    )
