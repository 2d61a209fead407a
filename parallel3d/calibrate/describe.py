"""Calibration: measure this machine and write this-machine.json to the user's config folder.

A device is a GPU, or on a CPU a process with its share of the cores while all processes are busy.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from math import inf
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import psutil
import torch

from parallel3d.base.atomic import replace_text
from parallel3d.base.errors import TrainingError
from parallel3d.calibrate.curves import fit_curves, fit_link, fit_program
from parallel3d.calibrate.measure_device import Effort, measure_device, measure_links, set_threads
from parallel3d.calibrate.steps import SmallRun, Timed, small_runs, time_steps
from parallel3d.config.hardware import Cores, Figure, Hardware, Host, Link, recognise, user_folder
from parallel3d.mesh.mesh import Mesh
from parallel3d.verify.local_ranks import run_locally

NAME = "this-machine"
_MOST_PROCESSES = 8  # on a CPU; more would not change the figures
Say = Callable[[str], None]
Rows = list[dict[str, Any]]  # [ranks]: a Measured as JSON


def calibrate(say: Say = print, path: Path | None = None, effort: Effort | None = None) -> Hardware:
    """Measure this machine, write the figures as a Hardware to `path`, and return them.

    `say` prints progress. Raises TrainingError if a figure cannot be measured or `path` cannot be
    written; then nothing is written.
    """
    effort = effort or Effort()
    if path is None:
        path = user_folder() / f"{NAME}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = f"{error.strerror}; set XDG_CONFIG_HOME to a writable folder"
            raise TrainingError(f"cannot write {path}: {why}") from None
    if not os.access(path.parent, os.W_OK):
        raise TrainingError(f"cannot write {path}: use an existing, writable folder")
    on_gpu, ranks = _devices()
    say(f"measuring {ranks} {'GPUs' if on_gpu else 'processes on the CPU'} at once")
    together = _measure(ranks, effort)
    links = together[0].pop("links")
    alone: Rows = []
    if not on_gpu:
        say("measuring one process alone")
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
        # On a GPU the host's time is hidden behind queued kernels.
        say("timing training steps of small models")
        timed = dict(_steps(ranks, effort))
        curves, hardware = fit_program(curves, hardware, timed)
    _check(hardware.model_dump())
    numbers = {name: _rounded(value) for name, value in asdict(curves).items()}
    hardware = hardware.model_copy(update={"curves": numbers})
    text = hardware.model_dump_json(indent=2, exclude_none=True)
    try:
        replace_text(path, f"{text}\n", shared=True)
    except OSError as error:
        raise TrainingError(f"cannot write {path}: {error}") from None
    for line in summary(hardware, together[0]["left_out"]):
        say(line)
    say(f"written to {path}")
    return hardware


def summary(hardware: Hardware, left_out: Sequence[str] = ()) -> list[str]:
    """Return the figures of a machine as lines of text."""
    assert hardware.memory_bandwidth and hardware.adam_params and hardware.host
    products = hardware.matmul_flops.items()
    lines = [
        *(f"{dtype} products: {rate.value / 1e9:,.0f} GFLOP/s" for dtype, rate in products),
        f"memory: {hardware.memory_bytes.value / 1e9:,.1f} GB per device, "
        f"{hardware.memory_bandwidth.value / 1e9:,.1f} GB/s",
        f"Adam: {hardware.adam_params.value / 1e6:,.0f} M parameters/s on the device, "
        f"{hardware.host.adam_params.value / 1e6:,.0f} M on the host",
        f"host to device: {hardware.host.device_bandwidth.value / 1e9:,.1f} GB/s",
    ]
    if hardware.link:
        rate, latency = hardware.link.bandwidth.value, hardware.link.latency.value
        lines.append(f"between ranks: {rate / 1e9:,.2f} GB/s, latency {1e6 * latency:,.0f} us")
    return [*lines, *(f"not measured: {text}" for text in left_out)]


def _devices() -> tuple[bool, int]:
    """Return True if there are accelerators, and the number of processes to measure with."""
    if torch.accelerator.is_available():
        return True, torch.accelerator.device_count()
    # At least two, even on a single core: measuring communication takes two ranks.
    return False, max(2, min(_MOST_PROCESSES, len(os.sched_getaffinity(0))))


def _measure(ranks: int, effort: Effort) -> Rows:
    return run_locally(_on_rank, ranks, ranks, effort, timeout=600)


def _on_rank(rank: int, ranks: int, effort: Effort) -> dict[str, object]:
    mesh = Mesh(dp=ranks)
    set_threads(mesh)

    def say(text: str) -> None:
        if rank == 0:
            print(f"  {text}", file=sys.stderr, flush=True)

    measured = measure_device(mesh, effort, say)
    measured["links"] = measure_links(mesh, effort, say) if ranks > 1 else {}
    mesh.barrier()
    return measured


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _figure(value: float, note: str = "") -> Figure:
    source = f"measured on {date.today().isoformat()} by parallel3d plan --calibrate{note}"
    return Figure(value=_rounded(value), source=source)


def _describe(together: Rows, alone: Rows, on_gpu: bool) -> Hardware:
    """Return the ranks' measurements as a Hardware, without link and curves."""

    def mean(name: str) -> float:
        return fmean(row[name] for row in together)

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
        name=NAME, device_names=(first["device_name"],) if on_gpu else (),
        peak_flops={**flops, **published}, matmul_flops=flops,
        memory_bytes=_figure(mean("memory_bytes")), memory_bandwidth=_figure(mean("bandwidth")),
        devices_per_node=_figure(len(together)) if on_gpu else None, host=host,
        adam_params=_figure(mean("adam_params")), cores=_cores(together, alone),
    )  # fmt: skip


def _cores(together: Rows, alone: Rows) -> Cores | None:
    """Return the time of a process alone over that of all at once, by kind of operator."""
    if not alone:
        return None
    one, among = alone[0], together[0]
    pairs = {
        kind: [*zip(one[kind], among[kind], strict=False)] for kind in ("attention", "traffic")
    }
    pairs["matmul"] = [
        pair
        for dtype, rows in one["matmul"].items()
        for pair in zip(rows, among["matmul"].get(dtype, ()), strict=False)
    ]
    factors = {
        kind: _figure(min(1.0, geometric_mean(a[-1] / b[-1] for a, b in rows)))
        for kind, rows in pairs.items()
    }
    return Cores(count=_figure(len(together)), alone=factors)


def _steps(ranks: int, effort: Effort) -> Iterator[tuple[SmallRun, Timed]]:
    """Yield small runs on one and on all processes, with the shortest of their steps."""
    chosen = small_runs(ranks)[: effort.small_runs]
    for world_size in (ranks, 1):
        runs = [run for run in chosen if run.mesh.ranks == world_size]
        timings = run_locally(time_steps, world_size, runs, effort.steps, True, timeout=600)[0]
        for run, steps in zip(runs, timings, strict=True):
            yield run, Timed(*map(min, zip(*steps, strict=True)))


def _check(measured: Any, place: str = "") -> None:
    """Raise TrainingError unless every figure is a positive number."""
    if isinstance(measured, Mapping):
        for name, inner in measured.items():
            _check(inner, f"{place}.{name}".lstrip("."))
    elif isinstance(measured, Sequence) and not isinstance(measured, str):
        for inner in measured:
            _check(inner, place)
    elif type(measured) in (int, float) and not 0 < measured < inf:
        raise TrainingError(
            f"cannot calibrate: {place} was measured as {measured:g}, which is not a positive "
            "number; nothing is written. Try again while nothing else runs on this machine"
        )
