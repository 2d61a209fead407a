"""Calibration: measure this machine and write this-machine.json to the user's config folder.

A device is a GPU, or on a CPU a process with its share of the cores while all processes are busy.

The planner's efficiency curves and link figures are fitted by the planner's own formulas, so that
plans reproduce the measurements.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from math import exp, inf
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import numpy as np
import psutil
import torch

from parallel3d.base.atomic import replace_text
from parallel3d.base.errors import TrainingError
from parallel3d.base.say import Say
from parallel3d.config.hardware import Cores, Figure, Hardware, Host, Link, recognise, user_folder
from parallel3d.extras.calibrate.measure_device import (
    Effort,
    Links,
    measure_device,
    measure_links,
    set_threads,
)
from parallel3d.extras.calibrate.steps import SmallRun, Timed, small_runs, time_steps
from parallel3d.mesh.mesh import Mesh
from parallel3d.model.spec import Attention, MatMul
from parallel3d.plan.setting import ENGINE, Precision, Setting
from parallel3d.plan.time.network import collective_seconds, send_seconds
from parallel3d.plan.time.operators import (
    Curves,
    attention_seconds,
    fitted,
    matmul_seconds,
    traffic_seconds,
)
from parallel3d.plan.time.step import step_time
from parallel3d.verify.local_ranks import run_locally

NAME = "this-machine"
Rows = list[dict[str, Any]]  # [ranks]: as `measure_device` returns it, with "links"
Bounds = tuple[float, float]
_PRIOR = 0.05  # weight that keeps an undetermined parameter near its start
_STEP = 1e-4  # change of a parameter's logarithm for numerical gradients
# Measured figures of a Hardware include the efficiencies that data sheets leave out.
_MEASURED = dict.fromkeys(("datasheet", "link", "network", "latency", "host"), 1.0) | {
    "overhead_per_collective": 1e-6
}
# Starting values for cores, which have small waves of tiles and no queue of kernels.
_ON_CPU = {
    "wave": 100.0,
    "depth": 5.0,
    "flash": 0.5,
    "traffic": 0.5,
    "optimizer": 0.1,
    "overhead_per_collective": 1e-5,
    "overhead_per_gather": 2e-4,
    "overhead_per_message": 2e-4,
}
# Only complete steps determine the following. One process, up to the reduction of gradients:
# memory-bound work of the model, passes over all gradients, and the host's time.
_ONE: dict[str, Bounds] = {
    "traffic": (0.005, 20.0),
    "optimizer": (0.005, 20.0),
    "overhead_per_layer": (1e-6, 0.1),
    "overhead_per_action": (1e-6, 0.1),
    "overhead_per_gather": (1e-7, 0.1),
}
_UPDATE: dict[str, Bounds] = {"overhead_per_param": (1e-7, 0.1), "overhead_per_step": (1e-6, 1.0)}
_CROWD = "crowd"  # not a curve: the factor on host time if several processes run
# Several processes: the cost of gathers and collectives in a step.
_SEVERAL: dict[str, Bounds] = {
    "link": (0.02, 5.0),
    "latency": (0.5, 5.0),
    "overhead_per_collective": (1e-7, 0.1),
    "overhead_per_message": (1e-7, 0.1),
    _CROWD: (1.0, 2.0),
}
_OWN = (
    "overhead_per_layer",
    "overhead_per_action",
    "overhead_per_gather",
    "overhead_per_param",
    "overhead_per_step",
)


def calibrate(say: Say = print, path: Path | None = None, effort: Effort | None = None) -> Hardware:
    """Measure this machine, write the figures as a Hardware to `path`, and return them.

    `say` prints progress. Raises TrainingError if a figure cannot be measured, or there can be no
    folder for `path`; then nothing is written.
    """
    effort = effort or Effort()
    path = path or user_folder() / f"{NAME}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(
            f"cannot write {path}: {error.strerror}; set XDG_CONFIG_HOME to a writable folder"
        ) from None
    on_gpu, ranks = _devices()
    say(f"measuring {ranks} {'GPUs' if on_gpu else 'processes on the CPU, then one alone'}")
    together = _measure(ranks, effort)
    alone = [] if on_gpu else _measure(1, effort)
    links = together[0].pop("links")
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
        curves, hardware = fit_program(curves, hardware, dict(_steps(ranks, effort)))
    numbers = {name: _rounded(value) for name, value in asdict(curves).items()}
    hardware = hardware.model_copy(update={"curves": numbers})
    replace_text(path, f"{hardware.model_dump_json(indent=2, exclude_none=True)}\n", shared=True)
    say(f"written to {path}")
    return hardware


def _devices() -> tuple[bool, int]:
    """Return True if there are accelerators, and the number of processes to measure with."""
    if torch.accelerator.is_available():
        return True, torch.accelerator.device_count()
    # At least two, even on a single core: measuring communication takes two ranks. More than eight
    # would not change the figures.
    return False, max(2, min(8, len(os.sched_getaffinity(0))))


def _measure(ranks: int, effort: Effort) -> Rows:
    return run_locally(_on_rank, ranks, ranks, effort, timeout=600)


def _on_rank(rank: int, ranks: int, effort: Effort) -> dict[str, object]:
    mesh = Mesh(dp=ranks)
    set_threads(mesh)
    measured = measure_device(mesh, effort)
    measured["links"] = measure_links(mesh, effort) if ranks > 1 else {}
    mesh.barrier()
    return measured


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _figure(value: float) -> Figure:
    source = f"measured on {date.today().isoformat()} by parallel3d plan --calibrate"
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
        adam_params=_figure(mean("host_adam_params")),
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
    """Return the time of a process alone over that of all at once, by kind of operator."""
    if not alone:
        return None
    one = alone[0]
    among = together[0]
    pairs = {
        kind: [*zip(one[kind], among[kind], strict=False)] for kind in ("attention", "traffic")
    }
    pairs["matmul"] = []
    for dtype, rows in one["matmul"].items():
        pairs["matmul"] += zip(rows, among["matmul"].get(dtype, ()), strict=False)
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


def fit(
    start: Mapping[str, float],
    bounds: Mapping[str, Bounds],
    predict: Callable[[Mapping[str, float]], Sequence[float]],
    measured: Sequence[float],
) -> dict[str, float]:
    """Return the parameters within `bounds` whose predictions are nearest to `measured`.

    Least squares of log(predicted / measured) over the parameters' logarithms, by
    Levenberg-Marquardt. Parameters that the measurements do not determine stay near their start.
    """
    names = list(bounds)
    low, high = (np.log([bounds[name][i] for name in names]) for i in (0, 1))
    origin = np.clip(np.log([max(start[name], 1e-12) for name in names]), low, high)
    log_measured = np.log(np.asarray(measured, dtype=float))

    def residuals(x: np.ndarray) -> np.ndarray:
        values = {name: exp(value) for name, value in zip(names, x, strict=True)}
        predicted = np.asarray(predict({**start, **values}), dtype=float)
        return np.concatenate([np.log(predicted) - log_measured, _PRIOR * (x - origin)])

    x = origin
    damping = 1e-2
    now = residuals(x)
    for _ in range(40):
        moved = [residuals(x + _STEP * row) for row in np.eye(len(names))]
        jacobian = np.stack([(there - now) / _STEP for there in moved], axis=1)
        normal = jacobian.T @ jacobian
        change = np.linalg.solve(normal + damping * np.eye(len(names)), -jacobian.T @ now)
        candidate = np.clip(x + np.clip(change, -1, 1), low, high)
        there = residuals(candidate)
        gained = float(now @ now) - float(there @ there)
        if gained > 0:
            x = candidate
            now = there
            damping = damping / 3
        else:
            damping *= 5
        if 0 < gained < 1e-9 or damping > 1e8:
            break
    return {**start, **{name: exp(value) for name, value in zip(names, x, strict=True)}}


def fit_link(links: Links, ranks: int) -> tuple[float, float]:
    """Return the bandwidth and latency that best fit the timings of all collectives."""
    size, seconds = max(links["all_gather"])
    rows: list[tuple[Any, int, float]] = []
    for kind, timed in links.items():
        rows += [(kind, *row) for row in timed]
    curves = Curves(**{**asdict(Curves()), **_MEASURED})

    def predict(values: Mapping[str, float]) -> list[float]:
        link = Link(bandwidth=_tried(values["bandwidth"]), latency=_tried(values["latency"]))
        tried = Hardware(
            name="", device_names=(), peak_flops={}, memory_bytes=_tried(1.0), link=link
        )
        seconds = []
        for kind, size, _ in rows:
            if kind == "send":
                seconds.append(send_seconds(size, False, tried, curves))
            else:
                seconds.append(collective_seconds(kind, size, ranks, ranks, tried, curves))
        return seconds

    fitted_link = fit(
        {"bandwidth": size / seconds, "latency": min(seconds for *_, seconds in rows)},
        {"bandwidth": (1e6, 1e13), "latency": (1e-8, 1.0)},
        predict,
        [seconds for *_, seconds in rows],
    )
    return fitted_link["bandwidth"], fitted_link["latency"]


def _tried(value: float) -> Figure:
    return Figure(value=value, source="a value that the fit tries")


def fit_curves(together: Sequence[Mapping[str, Any]], hardware: Hardware, on_gpu: bool) -> Curves:
    """Return fitted efficiency curves of matrix products, attention and memory-bound operators.

    The other curves are those of published runs on a GPU, and starting values on a CPU.
    """
    first = together[0]
    values = asdict(fitted()) | _MEASURED if on_gpu else asdict(Curves()) | _MEASURED | _ON_CPU

    def improve(
        bounds: dict[str, Bounds], seconds_of: Callable[..., float], rows: list[tuple[Any, float]]
    ) -> dict[str, float]:
        return fit(
            values,
            bounds,
            lambda v: [seconds_of(Curves(**v), *row) for row, _ in rows],
            [seconds for _, seconds in rows],
        )

    products = []
    for dtype, rows in first["matmul"].items():
        if dtype != "fp16" or "bf16" not in first["matmul"]:
            for m, k, n, seconds in rows:
                products.append(((MatMul(m, k, n), dtype), seconds))
    values = improve(
        {
            "matmul": (0.05, 1.2),
            "wave": (1.0, 1e8),
            "depth": (0.1, 1e4),
            "overhead_per_operator": (1e-7, 1e-3),
        },
        lambda curves, product, dtype: matmul_seconds(product, dtype, hardware, curves),
        products,
    )
    trained: Precision = "bf16" if on_gpu else "fp32"
    attentions = []
    for batch, heads, seq, size, forward_seconds, backward_seconds in first["attention"]:
        attention = Attention(batch, heads, heads, seq, size)
        for seconds, is_backward in ((forward_seconds, False), (backward_seconds, True)):
            if seconds > 0:
                attentions.append(((attention, is_backward), seconds))
    values = improve(
        {"flash": (0.005, 3.0), "flash_backward": (0.02, 5.0)},
        lambda curves, attention, backward: attention_seconds(
            attention, trained, hardware, curves, ENGINE, backward
        ),
        attentions,
    )
    values = improve(
        {"traffic": (0.005, 20.0)},
        lambda curves, numel: traffic_seconds(numel, "fp32", hardware, curves),
        [((size // 4,), seconds) for _, size, seconds in first["traffic"]],
    )
    return Curves(**values)


def fit_program(
    curves: Curves, hardware: Hardware, timed: Mapping[SmallRun, Timed]
) -> tuple[Curves, Hardware]:
    """Return curves and hardware with the host's time, fitted to steps of small runs.

    The hardware gets the rates of complete updates, and the speedup of a process that runs alone.
    """
    settings = {run: Setting.from_config(run.config()) for run in timed}
    alone = {settings[run]: one for run, one in timed.items() if run.mesh.ranks == 1}
    several = {settings[run]: one for run, one in timed.items() if run.mesh.ranks > 1}
    values = {**asdict(curves), _CROWD: 1.0}
    hardware, values = _fit_updates(values, hardware, alone)

    never = Figure(value=1e18, source="none: no limit")

    def steps(v: Mapping[str, float], machine: Hardware, of: Sequence[Setting]) -> list[float]:
        fitted, there = _applied(v, machine)
        return [step_time(setting, there, fitted).seconds for setting in of]

    if alone:
        # Host time once per step is partly in the update, partly in the reduction before it.
        after = {name: values[name] for name in _UPDATE}
        reduced = [t.seconds - t.update for t in alone.values()]
        no_adam = _with_adam(hardware, never, never)
        values = fit(values, {**_ONE, **_UPDATE}, lambda v: steps(v, no_adam, list(alone)), reduced)
        values |= {name: values[name] + after[name] for name in _UPDATE}
    if several:
        values = fit(
            values,
            _SEVERAL,
            lambda v: steps(v, hardware, list(several)),
            [t.seconds for t in several.values()],
        )
    return _applied(values, hardware)


def _fit_updates(
    values: dict[str, float], hardware: Hardware, alone: Mapping[Setting, Timed]
) -> tuple[Hardware, dict[str, float]]:
    """Return the hardware with the update rates of `engine.step`, and its fitted host time.

    The rates come from the largest models, the host time from small ones.
    """
    assert hardware.adam_params and hardware.host
    slowdown = hardware.slowdown("traffic", 1)
    fixed = min((one.update for one in alone.values()), default=0.0)
    rates = {"none": hardware.adam_params, "cpu": hardware.host.adam_params}
    for offload, figure in rates.items():
        chosen = {s: t.update for s, t in alone.items() if s.state.offload_optimizer == offload}
        largest = max(chosen, key=lambda setting: setting.workload.num_params, default=None)
        if largest and chosen[largest] > 2 * fixed:  # smaller updates do not determine a rate
            rate = slowdown * largest.workload.num_params / (chosen[largest] - fixed)
            rates[offload] = Figure(value=_rounded(rate), source=figure.source)
    small = {s: t.update for s, t in alone.items() if t.update < 4 * fixed}

    def predict(v: Mapping[str, float]) -> list[float]:
        predicted = []
        for setting in small:
            num_tensors = sum(len(layer.params) for layer in setting.workload.layers)
            host_seconds = v["overhead_per_step"] + v["overhead_per_param"] * num_tensors
            rate = rates[setting.state.offload_optimizer].value
            predicted.append(host_seconds + slowdown * setting.workload.num_params / rate)
        return predicted

    if small:
        values = fit(values, _UPDATE, predict, list(small.values()))
    return _with_adam(hardware, rates["none"], rates["cpu"]), values


def _with_adam(hardware: Hardware, device: Figure, host: Figure) -> Hardware:
    assert hardware.host
    changed = hardware.host.model_copy(update={"adam_params": host})
    return hardware.model_copy(update={"adam_params": device, "host": changed})


def _applied(values: Mapping[str, float], hardware: Hardware) -> tuple[Curves, Hardware]:
    """Return curves and hardware with the values that `fit_program` fits."""
    crowd = values[_CROWD]
    known = {name: value for name, value in values.items() if name != _CROWD}
    fitted = Curves(**{**known, **{name: values[name] * crowd for name in _OWN}})
    if hardware.cores is None:
        return fitted, hardware
    own = Figure(value=_rounded(1 / crowd), source=hardware.cores.count.source)
    cores = Cores(count=hardware.cores.count, alone={**hardware.cores.alone, "overhead": own})
    return fitted, hardware.model_copy(update={"cores": cores})
