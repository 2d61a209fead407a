"""Seconds of a matrix product, of attention and of memory-bound work on one device.

A roofline: an operator takes the longer of its FLOPs and its bytes, at an efficiency by size
(`Curves`), and the time of its launch.
"""

import json
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, NoReturn

from parallel3d.base.errors import ConfigError
from parallel3d.base.section import Problem, Problems
from parallel3d.config.hardware import Hardware
from parallel3d.model.spec import Attention, MatMul, Work
from parallel3d.plan.setting import BYTES, Precision, Software


@dataclass(frozen=True)
class Curves:
    """Fraction of the hardware's figures that programs reach, and their overheads in seconds.

    One set holds for all devices and programs, fitted on published runs (curves.json, which
    benchmarks/fit_curves.py writes; docs/planner/validation.md has its output); a machine on which
    `launch/plan.py --calibrate` ran has its own.
    """

    datasheet: float = 0.82
    """The highest measured FLOP/s of a product as a fraction of the data sheet's, where no
    measurement is known."""
    matmul: float = 0.9
    """Fraction of the highest measured FLOP/s that an endlessly large product reaches."""
    wave: float = 1.2e6
    """Elements of the output whose time is lost at the end of a product: devices compute tiles in
    waves, the last of which is not full."""
    depth: float = 100.0
    """Inner size (k) of a product that costs as much as starting its tiles."""
    fp8: float = 0.85
    """Part that products in fp8 have of what the data sheet gives fp8 over bf16."""
    flash: float = 0.6
    """Fraction of the highest product rate that flash attention reaches with large heads."""
    flash_head: float = 32.0
    """Head size with which flash attention reaches half of that."""
    flash_backward: float = 0.85
    """The rate of its backward pass as a fraction of its forward's."""
    ported: float = 0.65
    """The rate of an attention kernel for older chips as a fraction of one written for the chip."""
    traffic: float = 0.75
    """Fraction of the memory bandwidth that memory-bound operators reach."""
    fused: float = 0.5
    """Part of their traffic that is left where the program fuses those that follow one another."""
    optimizer: float = 0.75
    """Fraction of the memory bandwidth that the device's optimizer reaches."""
    link: float = 0.75
    """Fraction of a link's bandwidth inside a node that collectives reach."""
    network: float = 0.75
    """Fraction of the network's bandwidth that they reach between two nodes."""
    congestion: float = 0.03
    """Time that each doubling of the number of nodes adds to the network's, as a fraction."""
    latency: float = 1.0
    """Factor of the latencies in the description of the hardware."""
    overlap: float = 0.7
    """Part of a transfer that costs nothing where it runs behind computes that last longer."""
    tensor_overlap: float = 0.7
    """Part of a tensor-parallel collective that costs nothing behind matrix products."""
    host: float = 0.8
    """Fraction of the bandwidth to host and NVMe that offload reaches."""
    overhead_per_operator: float = 6e-6
    """Seconds that each operator takes to start."""
    overhead_per_collective: float = 1e-5
    """Seconds that the ranks of a collective take to meet."""
    overhead_per_layer: float = 4.2e-4
    """Seconds of the program in each layer, in each forward; twice that in a backward (0.33 ms was
    measured for eager PyTorch at toy sizes, without the launches of kernels). A device of its own
    computes meanwhile, so that there the longer of both counts."""
    overhead_per_action: float = 1e-4
    """Seconds of the program in each forward or backward of a stage."""
    overhead_per_gather: float = 1e-5
    """Seconds of the program for each parameter that ZeRO-3 gathers or reduces."""
    overhead_per_message: float = 0.0
    """The same, more, where the parameter's shards are on several ranks: between processes on
    cores, where ranks meet slowly; a device's own network hides it."""
    overhead_per_param: float = 1e-6
    """Seconds of the program for each parameter once a step."""
    overhead_per_step: float = 5e-3
    """Seconds of the program once a step."""


FILE = Path(__file__).with_name("curves.json")
# Fractions that no device passes. Calibrated ones of a CPU's work can: what is in its caches is
# faster than the memory that it was measured against.
_FRACTIONS = frozenset({"datasheet", "fp8", "ported", "fused", "network", "host"})
_MAY_BE_0 = frozenset({"overlap", "tensor_overlap", "congestion"})  # and every overhead
_MOST = dict.fromkeys((*_FRACTIONS, "overlap", "tensor_overlap"), 1.0)
_MOST_OF_ALL = 1e12  # a size in elements, say; beyond it sums overflow


@lru_cache(maxsize=1)
def fitted() -> Curves:
    """Return the curves fitted on all published runs, with which the planner plans."""
    return Curves(**json.loads(FILE.read_text(encoding="utf-8"))["all"]["curves"])


def curves_for(hardware: Hardware) -> Curves:
    """Return this machine's own curves, else the fitted ones; ConfigError for impossible ones."""
    if problems := [p for item in (hardware.curves or {}).items() if (p := _problem(*item))]:
        raise Problems(problems, f"the hardware {hardware.name}")
    return Curves(**hardware.curves) if hardware.curves else fitted()


def _problem(name: str, value: float) -> Problem | None:
    path, known = f"curves.{name}", Curves.__dataclass_fields__
    if name not in known:
        near = get_close_matches(name, known, n=1)
        remedy = f'the nearest one is "{near[0]}"' if near else f"use {', '.join(known)}"
        return Problem(path, value, "is no curve", remedy)
    least = "at least 0" if name in _MAY_BE_0 or name.startswith("overhead") else "above 0"
    most = _MOST.get(name, _MOST_OF_ALL)
    if (value > 0 or (least == "at least 0" and value == 0)) and value <= most:
        return None
    return Problem(path, value, f"must be {least} and at most {most:g}", "measure it again")


@dataclass(eq=False)
class Machine:
    """The hardware and program that run operators; equal machines are one object."""

    hardware: Hardware
    software: Software
    curves: Curves


_machines: dict[tuple[int, Software, Curves], Machine] = {}


def machine_of(hardware: Hardware, software: Software, curves: Curves) -> Machine:
    """Return the machine of this hardware, software and curves; equal ones are one object."""
    if len(_machines) > 4096:  # a fit tries thousands of curves
        _machines.clear()
    # It holds on to the hardware, so that its id is not given to another.
    return _machines.setdefault(
        (id(hardware), software, curves), Machine(hardware, software, curves)
    )


KERNELS = 8  # memory-bound operators of a layer, of which each must start
# Times that attention scores pass to or from memory besides the products that write or read them:
# masked softmax reads and writes, dropout reads and writes (and a mask of one byte).
SCORE_PASSES = 4.5
SCORE_PASSES_BACKWARD = 5.5  # dropout as forward, softmax reads two and writes one
FLASH_BACKWARD_FLOPS = 2.5  # five products for two: arXiv:2307.08691, section 4.1


def matmul_flops(hardware: Hardware, precision: Precision, curves: Curves) -> float:
    """The highest FLOP/s of a matrix product: measured, or a fraction of the data sheet's.

    bf16 and fp16 stand in for each other; fp8 is bf16 times the data sheet's ratio of the two.
    Raises ConfigError where nothing is known.
    """
    if precision == "fp8" and (eight := hardware.peak("fp8")) and (full := hardware.peak("bf16")):
        return matmul_flops(hardware, "bf16", curves) * eight / full * curves.fp8
    for dtype in {"bf16": ("bf16", "fp16"), "fp16": ("fp16", "bf16")}.get(precision, (precision,)):
        if measured := hardware.matmul_flops.get(dtype):
            return measured.value
        if (peak := hardware.peak(dtype)) is not None:
            return peak * curves.datasheet
    known = ", ".join(sorted({*hardware.peak_flops, *hardware.matmul_flops}))
    raise ConfigError(
        f"hardware {hardware.name}: no FLOP/s is known for {precision}; use one of {known}, or add "
        f'peak_flops["{precision}"] with its source to configs/hardware/{hardware.name}.json'
    )


def matmul_seconds(
    product: MatMul, precision: Precision, hardware: Hardware, curves: Curves
) -> float:
    """Seconds of a matrix product: of its FLOPs, or of its bytes if these take longer.

    The last wave of tiles, which is not full, and the start of each tile are added.
    """
    m, k, n, batch = product
    flops = product.flops * (1 + curves.wave / (m * n * batch)) * (1 + curves.depth / k)
    rate = matmul_flops(hardware, precision, curves) * curves.matmul
    inputs = 1 if precision == "fp8" else BYTES[precision]
    moved = batch * (inputs * k * (m + n) + BYTES[precision] * m * n)
    return max(flops / rate, moved / bandwidth_of(hardware)) + curves.overhead_per_operator


def backward_products(product: MatMul) -> tuple[MatMul, MatMul]:
    """The two products of a product's backward: the gradients of its input and its weight."""
    m, k, n, batch = product
    return MatMul(m, n, k, batch), MatMul(k, m, n, batch)


def attention_seconds(
    attention: Attention, precision: Precision, hardware: Hardware, curves: Curves,
    software: Software, backward: bool = False,
) -> float:  # fmt: skip
    """Seconds of softmax attention by the kernel that `software` has.

    "flash": FLOPs at a rate of its own, half of them where the kernel leaves out what the causal
    mask hides. "classic": two batched products, and the scores to and from memory.
    """
    half: Precision = "bf16" if precision == "fp8" else precision  # scores are not in fp8
    batch, heads, _, seq, size = attention
    if software.attention == "classic":
        pair = (MatMul(seq, size, seq, batch * heads), MatMul(seq, seq, size, batch * heads))
        products = tuple(p for product in pair for p in backward_products(product))
        passes = SCORE_PASSES_BACKWARD if backward else SCORE_PASSES
        scores = int(passes * batch * heads * seq * seq)
        return traffic_seconds(scores, half, hardware, curves) + sum(
            matmul_seconds(p, half, hardware, curves) for p in (products if backward else pair)
        )
    flops = attention.flops * (0.5 * (1 + 1 / seq) if software.causal_skips else 1.0)
    rate = matmul_flops(hardware, half, curves) * curves.flash * size / (size + curves.flash_head)
    if "fp8" in hardware.peak_flops and not software.hopper:
        rate *= curves.ported
    if backward:
        flops, rate = flops * FLASH_BACKWARD_FLOPS, rate * curves.flash_backward
    moved = BYTES[half] * (2 * batch * seq * size) * (heads + attention.kv_heads)
    return max(flops / rate, moved / bandwidth_of(hardware)) + curves.overhead_per_operator


def traffic_seconds(
    elements: int, precision: Precision, hardware: Hardware, curves: Curves
) -> float:
    """Seconds of memory-bound operators that read and write `elements` elements in all."""
    return elements * BYTES[precision] / (bandwidth_of(hardware) * curves.traffic)


class WorkSeconds(NamedTuple):
    """Seconds of a Work's operators, without its collectives."""

    matmuls: float
    attention: float
    traffic: float


def work_seconds(
    work: Work, precision: Precision, hardware: Hardware, curves: Curves, software: Software,
    devices: int = 1, backward: bool = False,
) -> WorkSeconds:  # fmt: skip
    """Seconds of a Work, or of its backward; `devices`: how many of them share the machine."""
    products: tuple[MatMul, ...] = work.matmuls
    if backward:
        products = tuple(p for product in products for p in backward_products(product))
    matmuls = sum(matmul_seconds(p, precision, hardware, curves) for p in products)
    attention = traffic = 0.0
    if work.attention:
        attention = attention_seconds(
            work.attention, precision, hardware, curves, software, backward
        )
    if work.traffic:
        traffic = KERNELS * curves.overhead_per_operator
        # The loss was seldom fused: its fp32 copies of the logits pass memory one by one.
        left = curves.fused if software.fused and work.attention else 1.0
        traffic += left * traffic_seconds(work.traffic, precision, hardware, curves)
        traffic *= 2 if backward else 1
    return WorkSeconds(
        matmuls * hardware.slowdown("matmul", devices),
        attention * hardware.slowdown("attention", devices),
        traffic * hardware.slowdown("traffic", devices),
    )


def bandwidth_of(hardware: Hardware) -> float:
    """Bytes a second of a device's memory; raises ConfigError where they are not known."""
    known = hardware.memory_bandwidth
    key, instead = "memory_bandwidth", "plan for other hardware"
    return (known or refuse(hardware, "its memory's speed is not known", key, instead)).value


def refuse(hardware: Hardware, problem: str, key: str, instead: str) -> NoReturn:
    """Raise ConfigError for a figure that the hardware's description lacks."""
    name = hardware.name
    remedy = f"add {key} to configs/hardware/{name}.json, or {instead}"
    raise ConfigError(f"hardware {name}: {problem}; {remedy}")
