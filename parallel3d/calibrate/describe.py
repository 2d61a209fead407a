"""Calibration: measure this machine and write this-machine.json in the user's own folder.

On a GPU node each GPU is a device. On a CPU a device is a process with its share of the cores;
figures are of as many processes as there are shares, all of them busy.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from math import isfinite
from pathlib import Path
from typing import Any

import psutil
import torch

from parallel3d.base.atomic import replace_text
from parallel3d.base.errors import TrainingError
from parallel3d.calibrate.curves import fit_curves, fit_link, fit_program
from parallel3d.calibrate.device import Effort, measure_device, set_threads
from parallel3d.calibrate.fit import typical
from parallel3d.calibrate.links import measure_links
from parallel3d.calibrate.steps import SmallRun, Timed, small_runs, time_steps
from parallel3d.config.hardware import Cores, Figure, Hardware, Host, Link, recognise, user_folder
from parallel3d.mesh.mesh import Mesh
from parallel3d.verify.local_ranks import run_locally

NAME = "this-machine"
_MOST_PROCESSES = 8  # on a CPU: more of them tell nothing new
Say = Callable[[str], None]
Rows = list[dict[str, Any]]  # what each rank measured (a Measured in JSON)


def calibrate(say: Say = print, path: Path | None = None, effort: Effort | None = None) -> Hardware:
    """Measure this machine, write the figures as a Hardware to `path`, and return them.

    `say` hears what is measured and what comes out. The file appears whole or not at all. Raises
    TrainingError, and writes nothing, where something that a plan needs cannot be measured.
    """
    effort, path = effort or Effort(), path or _own_file()
    if not os.access(path.parent, os.W_OK):
        raise TrainingError(f"cannot write {path}: give a folder that is there, and yours")
    on_gpu, ranks = _devices()
    say(f"measuring {ranks} {'GPUs' if on_gpu else 'processes on the CPU'} at once")
    together = _measure(ranks, effort)
    links = together[0].pop("links")
    alone: Rows = []
    if not on_gpu:
        say("measuring one process by itself")
        alone = _measure(1, effort)
    for rank in (*together, *alone):
        _check(rank)
    hardware = _describe(together, alone, on_gpu)
    if links:
        bandwidth, latency = fit_link(links, ranks)
        link = Link(bandwidth=_figure(bandwidth), latency=_figure(latency))
        hardware = hardware.model_copy(update={"link": link})
    curves = fit_curves(together, hardware, on_gpu)
    if not on_gpu:
        # On a GPU the program's own time is hidden behind the kernels that wait in its queue.
        say("timing training steps of small models")
        timed = dict(_steps(ranks, effort))
        curves, hardware = fit_program(curves, hardware, timed)
    _check(hardware.model_dump())
    numbers = {name: _rounded(value) for name, value in asdict(curves).items()}
    hardware = hardware.model_copy(update={"curves": numbers})
    _write(hardware, path)
    for line in summary(hardware, together[0]["left_out"]):
        say(line)
    say(f"written to {path}")
    return hardware


def _own_file() -> Path:
    path = user_folder() / f"{NAME}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"{error.strerror}; set XDG_CONFIG_HOME to a folder that is yours"
        raise TrainingError(f"cannot write {path}: {why}") from None
    return path


def summary(hardware: Hardware, left_out: Sequence[str] = ()) -> list[str]:
    """The figures of a machine as lines of text."""
    assert hardware.memory_bandwidth and hardware.adam_params and hardware.host
    products = hardware.matmul_flops.items()
    lines = [
        *(f"{dtype} products: {rate.value / 1e9:,.0f} GFLOP/s" for dtype, rate in products),
        f"memory: {hardware.memory_bytes.value / 1e9:,.1f} GB for each, "
        f"{hardware.memory_bandwidth.value / 1e9:,.1f} GB/s",
        f"Adam: {hardware.adam_params.value / 1e6:,.0f} M parameters/s on the device, "
        f"{hardware.host.adam_params.value / 1e6:,.0f} M on the host",
        f"host to device: {hardware.host.device_bandwidth.value / 1e9:,.1f} GB/s",
    ]
    if hardware.link:
        rate, latency = hardware.link.bandwidth.value, hardware.link.latency.value
        lines.append(f"between ranks: {rate / 1e9:,.2f} GB/s after {1e6 * latency:,.0f} us")
    return [*lines, *(f"not measured: {text}" for text in left_out)]


def _devices() -> tuple[bool, int]:
    """Whether they are GPUs (or other accelerators), and how many processes to measure with."""
    if torch.accelerator.is_available():
        return True, torch.accelerator.device_count()
    # Two on a single core: there is no other way to measure what is between ranks.
    return False, max(2, min(_MOST_PROCESSES, len(os.sched_getaffinity(0))))


def _measure(ranks: int, effort: Effort) -> Rows:
    return run_locally(_on_rank, ranks, ranks, effort, timeout=600)


def _on_rank(rank: int, ranks: int, effort: Effort) -> dict[str, Any]:
    mesh = Mesh(dp=ranks)
    set_threads(mesh)

    def say(text: str) -> None:
        if rank == 0:
            print(f"  {text}", file=sys.stderr, flush=True)

    measured = measure_device(mesh, effort, say)
    measured["links"] = measure_links(mesh, effort, say) if ranks > 1 else {}
    mesh.barrier()
    return measured


def _source(note: str = "") -> str:
    return f"measured on {date.today().isoformat()} by parallel3d plan --calibrate{note}"


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _figure(value: float, note: str = "") -> Figure:
    return Figure(value=_rounded(value), source=_source(note))


def _describe(together: Rows, alone: Rows, on_gpu: bool) -> Hardware:
    """What the ranks measured, without the link and the curves."""

    def mean(name: str) -> float:
        total: float = sum(row[name] for row in together)
        return total / len(together)

    first = together[0]
    flops = {
        dtype: _figure(max(2 * m * k * n / seconds for m, k, n, seconds in rows))
        for dtype, rows in first["matmul"].items()
    }
    known = recognise(first["device_name"]) if on_gpu else None
    published = known.peak_flops if known and known.name != NAME else {}
    host = Host(
        memory_bytes=_figure(psutil.virtual_memory().total / len(together)),
        device_bandwidth=_figure(mean("host_copy")),
        adam_params=_figure(mean("host_adam_params"), f" ({first['host_adam']})"),
    )
    return Hardware(
        name=NAME,
        device_names=(first["device_name"],) if on_gpu else (),
        peak_flops={**flops, **published},
        matmul_flops=flops,
        memory_bytes=_figure(mean("memory_bytes")),
        memory_bandwidth=_figure(mean("bandwidth")),
        devices_per_node=_figure(len(together)) if on_gpu else None,
        host=host,
        adam_params=_figure(mean("adam_params")),
        cores=_cores(together, alone),
    )


def _cores(together: Rows, alone: Rows) -> Cores | None:
    if not alone:
        return None
    ratios = {
        "matmul": [
            by_itself[-1] / among[-1]
            for dtype, rows in alone[0]["matmul"].items()
            for by_itself, among in zip(rows, together[0]["matmul"].get(dtype, ()), strict=False)
        ]
    }
    for kind in ("attention", "traffic"):
        pairs = zip(alone[0][kind], together[0][kind], strict=False)
        ratios[kind] = [by_itself[-1] / among[-1] for by_itself, among in pairs]
    factors = {kind: _figure(min(1.0, typical(values))) for kind, values in ratios.items()}
    return Cores(count=_figure(len(together)), alone=factors)


def _steps(ranks: int, effort: Effort) -> Iterator[tuple[SmallRun, Timed]]:
    """Small training runs, alone and on all processes, and the least seconds of their steps."""
    chosen = small_runs(ranks)[: effort.small_runs]
    for world_size in (ranks, 1):
        runs = [run for run in chosen if run.ranks == world_size]
        taken = run_locally(time_steps, world_size, runs, effort.steps, True, timeout=600)[0]
        for run, steps in zip(runs, taken, strict=True):
            yield run, Timed(*map(min, zip(*steps, strict=True)))


def _check(measured: Any) -> None:
    """Raises TrainingError unless every figure is a positive number."""
    for place, value in _numbers("", measured):
        if not (isfinite(value) and value > 0):
            raise TrainingError(
                f"cannot calibrate: {place} came out as {value:g}; nothing is written. Leave the "
                "machine alone meanwhile, and try again"
            )


def _numbers(place: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(f"{place}.{name}".lstrip("."), inner)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for inner in value:
            yield from _numbers(place, inner)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield place, float(value)


def _write(hardware: Hardware, path: Path) -> None:
    text = hardware.model_dump_json(indent=2, exclude_none=True)
    try:
        replace_text(path, f"{text}\n", shared=True)
    except OSError as error:
        raise TrainingError(f"cannot write {path}: {error}") from None
