"""The machines of published runs: a chip of configs/hardware in the cluster it stood in.

A chip's file describes the vendor's own machine; a cluster may have other links, and a power cap.
"""

import re
from functools import lru_cache
from typing import Any

from parallel3d.config import hardware
from parallel3d.config.hardware import Figure, Hardware, Link

_DGXC = "NVIDIA DGX H100: eight 400 Gb/s ConnectX-7 a node (arXiv:2402.16819)"
_TITAN = "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md"


def _network(bandwidth: float, latency: float, source: str) -> Link:
    return Link(
        bandwidth=Figure(value=bandwidth, source=source),
        latency=Figure(value=latency, source=source),
    )


def _capped_h100(memory_gb: float) -> dict[str, Any]:
    """Meta's H100 with HBM2e and a cap of 500 W, for which no document states a peak."""
    peak = "pytorch/torchtitan: 'between SXM and NVL'; the middle of 989 and 835 TFLOP/s (bf16)"
    most = "794.5 of the H100's 989 TFLOP/s (configs/hardware), in proportion to the peak"
    bf16 = Figure(value=9.12e14, source=peak)
    fp8 = Figure(value=1.824e15, source=peak)
    return {
        "peak_flops": {"bf16": bf16, "fp8": fp8},
        "matmul_flops": {"bf16": Figure(value=7.945e14 * 912 / 989, source=most)},
        "memory_bytes": Figure(value=memory_gb * 1e9, source=_TITAN),
        "memory_bandwidth": Figure(value=2.4e12, source=_TITAN),
    }


# "Currently we have an issue with nccl that doesn't fully utilize Intel OPA full bandwidth": of the
# 400 Gb/s of a node's four links an all-reduce over 16 nodes had 44 to 57, less than one has.
_OMNI_PATH = "bigscience experiments/bandwidth/README.md: 55 Gb/s measured for a node of four V100"
_JEAN_ZAY: dict[str, Any] = {
    "devices_per_node": Figure(value=4, source="bigscience jz/hpc-specs.md"),
    "network": _network(6.8e9, 1e-5, _OMNI_PATH).model_copy(update={"one_ring": True}),
}
_DGX2_PEAK = "nv-adlr.github.io/MegatronLMV1: 62.4 TFLOP/s are 48 % of a DGX-2H's peak for a GPU"
_DGX2_MOST = "83 of the V100's 125 TFLOP/s (configs/hardware), in proportion to the peak"
_DGX2: dict[str, Any] = {
    "peak_flops": {"fp16": Figure(value=1.3e14, source=_DGX2_PEAK)},
    "matmul_flops": {"fp16": Figure(value=8.3e13 * 130 / 125, source=_DGX2_MOST)},
    "devices_per_node": Figure(value=16, source="NVIDIA DGX-2: 16 V100 behind NVSwitch"),
    "network": _network(6.25e9, 1e-5, "NVIDIA DGX-2: eight 100 Gb/s InfiniBand ports a node"),
}
_NEOX: dict[str, Any] = {
    "network": _network(1.25e10, 5e-6, "arXiv:2204.06745: four ConnectX-6 HCAs for eight A100")
}

# What the column `gpu` says -> the file in configs/hardware, and what the cluster changes. A chip's
# name stands alone: "A100" is no part of "A1000", nor "H200" of "GH200".
_CHIPS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (r"500w", "H100-SXM5-80GB", _capped_h100(96)),
    (r"h100 94gb", "H100-SXM5-80GB", _capped_h100(94)),
    (r"h200", "H200-SXM-141GB", {}),
    (r"h100", "H100-SXM5-80GB", {}),
    (r"gb200", "GB200-NVL72", {}),
    (r"gb300", "GB300-NVL72", {}),
    (r"b200", "B200-SXM-180GB", {}),
    (r"b300", "B300-SXM-288GB", {}),
    (r"mi300x", "MI300X", {}),
    (r"a100\b.*\b40 ?gb?", "A100-SXM4-40GB", {}),
    (r"a100", "A100-SXM4-80GB", {}),
    (r"v100-sxm-32gb \(dgx-2\)", "V100-SXM2-32GB", _DGX2),
    (r"v100 \(dgx-2\)", "V100-SXM2-32GB", _DGX2),
    (r"v100\b.*\b16 ?gb?", "V100-SXM2-16GB", {}),
    (r"v100", "V100-SXM2-32GB", {}),
)
# Other boards of the same chips: fewer units, lower clocks, and no NVLink between all devices.
_OTHER_BOARD = re.compile(r"pcie|nvl\b|\bmig\b|max-?q", re.IGNORECASE)
_CLUSTERS = {
    "gptneox20b": _NEOX,
    "bigscience_1b3_v100": _JEAN_ZAY,
    "bigscience_gpt2_v100": _JEAN_ZAY,
}
_MEMORY = re.compile(r"\b(\d\d\d?) ?gi?b?\b", re.IGNORECASE)


@lru_cache(maxsize=1024)
def at(
    source: str, gpu: str, gbps: float | None = None, node: int | None = None
) -> Hardware | None:
    """The hardware of a source's rows, or None for a device that no file describes (a TPU).

    `gpu` is a name in words, or that of a file in configs/hardware. Where a row states them:
    `gbps`, Gb/s of the network for each device, in one direction; `node`, devices of a node.
    """
    found = next((load for name, load in _files() if name == gpu.lower()), None)
    if found is None and not _OTHER_BOARD.search(gpu):
        found = next((load for words, load in _words() if words.search(gpu)), None)
    if found is None:
        return None
    file, changes = found
    machine = hardware.load(file).model_copy(update=changes | _CLUSTERS.get(source, {}))
    said = _MEMORY.search(gpu)
    if said and abs(float(said.group(1)) * 1e9 / machine.memory_bytes.value - 1) > 0.1:
        return None  # a board with another memory, such as an A100 with 64 GB
    if node is not None:
        devices = Figure(value=node, source="the row's devices_per_node")
        machine = machine.model_copy(update={"devices_per_node": devices})
    if gbps is None:
        return machine
    rate = Figure(value=gbps * 1e9 / 8, source="the row's network_gbps")
    latency = machine.network.latency if machine.network else Figure(value=1e-5, source="assumed")
    return machine.model_copy(update={"network": Link(bandwidth=rate, latency=latency)})


@lru_cache(maxsize=1)
def _files() -> tuple[tuple[str, tuple[str, dict[str, Any]]], ...]:
    return tuple((name.lower(), (name, {})) for name in hardware.names())


@lru_cache(maxsize=1)
def _words() -> tuple[tuple[re.Pattern[str], tuple[str, dict[str, Any]]], ...]:
    alone = r"(?<![a-z0-9])(?:%s)(?![0-9])"
    return tuple(
        (re.compile(alone % words, re.IGNORECASE), (file, changes))
        for words, file, changes in _CHIPS
    )


def chip(gpu: str) -> str:
    """The chip's short name, under which the constant-efficiency baseline pools its rows."""
    names = (
        "500W",
        "H100 94GB",
        "GB200",
        "GB300",
        "B200",
        "B300",
        "H200",
        "H100",
        "A100",
        "V100",
        "MI300X",
    )
    found = next((name for name in names if name.lower() in gpu.lower()), gpu)
    return "H100 500 W" if found in ("500W", "H100 94GB") else found
