"""Fits of the planner's efficiency curves and link figures to measurements of this machine.

They call the planner's own formulas, so a plan of what was measured gives just that.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from math import exp
from typing import Any

import numpy as np

from parallel3d.calibrate.steps import SmallRun, Timed
from parallel3d.config.hardware import Cores, Figure, Hardware, Link
from parallel3d.model.spec import Attention, MatMul
from parallel3d.plan.setting import ENGINE, Setting
from parallel3d.plan.time.network import collective_seconds, send_seconds
from parallel3d.plan.time.operators import (
    Curves,
    attention_seconds,
    fitted,
    matmul_seconds,
    traffic_seconds,
)
from parallel3d.plan.time.step import step_time

Bounds = tuple[float, float]
_PRIOR = 0.05  # how much a parameter that nothing determines stays where it was
_STEP = 1e-4  # of the logarithm of a parameter, for gradients
_MOST = 40  # steps of a fit
_TRIED = "a value that the fit tries"
# The figures of a Hardware that is measured have in them what data sheets leave open.
_MEASURED = dict.fromkeys(("datasheet", "link", "network", "latency", "host"), 1.0) | {
    "overhead_per_collective": 1e-6
}
# Cores have no waves of tiles to speak of, nor a queue of kernels; what there is, the fit finds.
_ON_CPU = {
    "wave": 100.0, "depth": 5.0, "flash": 0.5, "traffic": 0.5, "optimizer": 0.1,
    "overhead_per_collective": 1e-5, "overhead_per_gather": 2e-4, "overhead_per_message": 2e-4,
}  # fmt: skip
_PRODUCTS: dict[str, Bounds] = {
    "matmul": (0.05, 1.2), "wave": (1.0, 1e8), "depth": (0.1, 1e4),
    "overhead_per_operator": (1e-7, 1e-3),
}  # fmt: skip
_FLASH: dict[str, Bounds] = {"flash": (0.005, 3.0), "flash_backward": (0.02, 5.0)}
_TRAFFIC: dict[str, Bounds] = {"traffic": (0.005, 20.0)}
# Whole steps alone tell these. For one process, until the gradients are reduced: memory-bound work
# as the model has it, passes over whole gradients, and the program's own time.
_ONE: dict[str, Bounds] = {
    "traffic": (0.005, 20.0), "optimizer": (0.005, 20.0), "overhead_per_layer": (1e-6, 0.1),
    "overhead_per_action": (1e-6, 0.1), "overhead_per_gather": (1e-7, 0.1),
}  # fmt: skip
_UPDATE: dict[str, Bounds] = {"overhead_per_param": (1e-7, 0.1), "overhead_per_step": (1e-6, 1.0)}
_CROWD = "crowd"  # no curve: by how much the program's own time is longer among several
# For several: the cost of gathers and collectives in a step.
_SEVERAL: dict[str, Bounds] = {
    "link": (0.02, 5.0), "latency": (0.5, 5.0), "overhead_per_collective": (1e-7, 0.1),
    "overhead_per_message": (1e-7, 0.1), _CROWD: (1.0, 2.0),
}  # fmt: skip
_OWN = (
    "overhead_per_layer", "overhead_per_action", "overhead_per_gather", "overhead_per_param",
    "overhead_per_step",
)  # fmt: skip


def fit(
    start: Mapping[str, float],
    bounds: Mapping[str, Bounds],
    predict: Callable[[Mapping[str, float]], Sequence[float]],
    measured: Sequence[float],
) -> dict[str, float]:
    """Return the parameters within `bounds` whose predictions are nearest to `measured`.

    Least squares of log(predicted / measured) by Levenberg and Marquardt, over logarithms; what the
    measurements do not determine is drawn to its start.
    """
    names = list(bounds)
    low, high = (np.log([bounds[name][i] for name in names]) for i in (0, 1))
    origin = np.clip(np.log([max(start[name], 1e-12) for name in names]), low, high)
    wanted = np.log(np.asarray(measured, dtype=float))

    def residuals(x: np.ndarray) -> np.ndarray:
        values = {name: exp(value) for name, value in zip(names, x, strict=True)}
        predicted = np.asarray(predict({**start, **values}), dtype=float)
        return np.concatenate([np.log(predicted) - wanted, _PRIOR * (x - origin)])

    x, damping = origin, 1e-2
    now = residuals(x)
    for _ in range(_MOST):
        moved = [residuals(x + _STEP * row) for row in np.eye(len(names))]
        jacobian = np.stack([(there - now) / _STEP for there in moved], axis=1)
        normal = jacobian.T @ jacobian
        change = np.linalg.solve(normal + damping * np.eye(len(names)), -jacobian.T @ now)
        candidate = np.clip(x + np.clip(change, -1, 1), low, high)
        there = residuals(candidate)
        gained = float(now @ now) - float(there @ there)
        if gained > 0:
            x, now, damping = candidate, there, damping / 3
        else:
            damping *= 5
        if 0 < gained < 1e-9 or damping > 1e8:
            break
    return {**start, **{name: exp(value) for name, value in zip(names, x, strict=True)}}


def fit_link(links: Mapping[str, Sequence[tuple[int, float]]], ranks: int) -> tuple[float, float]:
    """Return the bandwidth and latency that explain the timings of all collectives best."""
    size, seconds = max(links["all_gather"])
    rows = [(kind, size, seconds) for kind, timed in links.items() for size, seconds in timed]
    curves = Curves(**{**asdict(Curves()), **_MEASURED})

    def predict(values: Mapping[str, float]) -> list[float]:
        hardware = _with_link(values["bandwidth"], values["latency"])
        return [_transfer(kind, size, ranks, hardware, curves) for kind, size, _ in rows]

    found = fit(
        {"bandwidth": size / seconds, "latency": min(seconds for *_, seconds in rows)},
        {"bandwidth": (1e6, 1e13), "latency": (1e-8, 1.0)},
        predict,
        [seconds for *_, seconds in rows],
    )
    return found["bandwidth"], found["latency"]


def _transfer(kind: Any, size: int, ranks: int, hardware: Hardware, curves: Curves) -> float:
    if kind == "send":
        return send_seconds(size, False, hardware, curves)
    return collective_seconds(kind, size, ranks, ranks, hardware, curves)


def _with_link(bandwidth: float, latency: float) -> Hardware:
    one, rate, wait = (Figure(value=value, source=_TRIED) for value in (1.0, bandwidth, latency))
    link = Link(bandwidth=rate, latency=wait)
    return Hardware(name="", device_names=(), peak_flops={}, memory_bytes=one, link=link)


def fit_curves(together: Sequence[Mapping[str, Any]], hardware: Hardware, on_gpu: bool) -> Curves:
    """Return fitted efficiency curves of matrix products, attention and memory-bound operators.

    On a GPU the others are those of published runs.
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

    values = improve(
        _PRODUCTS,
        lambda curves, product, dtype: matmul_seconds(product, dtype, hardware, curves),
        [
            ((MatMul(m, k, n), dtype), seconds)
            for dtype, rows in first["matmul"].items()
            for m, k, n, seconds in rows
            if dtype != "fp16" or "bf16" not in first["matmul"]
        ],
    )
    dtype: Any = "bf16" if on_gpu else "fp32"
    values = improve(
        _FLASH,
        lambda curves, attention, backward: attention_seconds(
            attention, dtype, hardware, curves, ENGINE, backward
        ),
        [
            ((Attention(b, h, h, s, size), backward), seconds[backward])
            for b, h, s, size, *seconds in first["attention"]
            for backward in (False, True)
            if seconds[backward] > 0
        ],
    )
    values = improve(
        _TRAFFIC,
        lambda curves, numel: traffic_seconds(numel, "fp32", hardware, curves),
        [((size // 4,), seconds) for _, size, seconds in first["traffic"]],
    )
    return Curves(**values)


def fit_program(
    curves: Curves, hardware: Hardware, timed: Mapping[SmallRun, Timed]
) -> tuple[Curves, Hardware]:
    """Return curves and hardware with the host program's own time, fitted to steps of small runs.

    The hardware has the rates of the whole update, and how much faster a process alone is.
    """
    settings = {run: Setting.from_config(run.config()) for run in timed}
    alone = {settings[run]: one for run, one in timed.items() if run.ranks == 1}
    several = {settings[run]: one for run, one in timed.items() if run.ranks > 1}
    values = {**asdict(curves), _CROWD: 1.0}
    hardware, values = _fit_updates(values, hardware, alone)

    never = Figure(value=1e18, source="none: no limit")

    def steps(v: Mapping[str, float], machine: Hardware, of: Sequence[Setting]) -> list[float]:
        fitted, there = _applied(v, machine)
        return [step_time(setting, there, fitted).seconds for setting in of]

    if alone:
        # What the program does once a step is in the update, and in the reduction before it.
        after = {name: values[name] for name in _UPDATE}
        reduced = [t.seconds - t.update for t in alone.values()]
        no_adam = _with_adam(hardware, never, never)
        values = fit(values, {**_ONE, **_UPDATE}, lambda v: steps(v, no_adam, list(alone)), reduced)
        values |= {name: values[name] + after[name] for name in _UPDATE}
    if several:
        values = fit(
            values, _SEVERAL, lambda v: steps(v, hardware, list(several)),
            [t.seconds for t in several.values()],
        )  # fmt: skip
    return _applied(values, hardware)


def _fit_updates(
    values: dict[str, float], hardware: Hardware, alone: Mapping[Setting, Timed]
) -> tuple[Hardware, dict[str, float]]:
    """Return the hardware with parameters a second that `engine.step` updates, and its own time.

    The rates are those of the largest models, the program's time that of small ones.
    """
    assert hardware.adam_params and hardware.host
    slowdown = hardware.slowdown("traffic", 1)
    fixed = min((one.update for one in alone.values()), default=0.0)
    rates = {"none": hardware.adam_params, "cpu": hardware.host.adam_params}
    for offload, figure in rates.items():
        chosen = {s: t.update for s, t in alone.items() if s.offload_optimizer == offload}
        largest = max(chosen, key=lambda setting: setting.num_params, default=None)
        if largest and chosen[largest] > 2 * fixed:  # else it is too small to tell
            rate = slowdown * largest.num_params / (chosen[largest] - fixed)
            rates[offload] = Figure(value=float(f"{rate:.4g}"), source=figure.source)
    small = {s: t.update for s, t in alone.items() if t.update < 4 * fixed}

    def predict(v: Mapping[str, float]) -> list[float]:
        return [
            v["overhead_per_step"]
            + v["overhead_per_param"] * sum(len(layer.params) for layer in setting.layers)
            + slowdown * setting.num_params / rates[setting.offload_optimizer].value
            for setting in small
        ]

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
    own = Figure(value=float(f"{1 / crowd:.4g}"), source=hardware.cores.count.source)
    alone = {**hardware.cores.alone, "overhead": own}
    cores = Cores(count=hardware.cores.count, alone=alone)
    return fitted, hardware.model_copy(update={"cores": cores})
