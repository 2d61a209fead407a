"""Fits of the planner's efficiency curves and link figures to measurements of this machine.

What is fitted calls the planner's own formulas, so that a plan of what was measured gives what was
measured, as far as the formulas can.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from parallel3d.calibrate.fit import Bounds, fit, fit_line
from parallel3d.calibrate.steps import SmallRun, Timed
from parallel3d.config.hardware import Cores, Figure, Hardware, Link
from parallel3d.model.spec import Attention, MatMul
from parallel3d.plan.setting import ENGINE, Setting
from parallel3d.plan.time.curves import fitted
from parallel3d.plan.time.network import collective_seconds, send_seconds
from parallel3d.plan.time.operators import (
    Curves,
    attention_seconds,
    matmul_seconds,
    traffic_seconds,
)
from parallel3d.plan.time.step import step_time

# What data sheets leave open is in the figures of a Hardware that is measured.
_TRIED = "a value that the fit tries"
_MEASURED = {
    "datasheet": 1.0,
    "link": 1.0,
    "network": 1.0,
    "latency": 1.0,
    "host": 1.0,
    "overhead_per_collective": 1e-6,
}
# Cores have no waves of tiles to speak of, nor a queue of kernels; what there is, the fit finds.
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
_PRODUCTS: dict[str, Bounds] = {
    "matmul": (0.05, 1.2),
    "wave": (1.0, 1e8),
    "depth": (0.1, 1e4),
    "overhead_per_operator": (1e-7, 1e-3),
}
_FLASH: dict[str, Bounds] = {"flash": (0.005, 3.0), "flash_backward": (0.02, 5.0)}
_TRAFFIC: dict[str, Bounds] = {"traffic": (0.005, 20.0)}
# What only whole steps tell. Of one process, until the gradients are reduced: memory-bound work as
# the model has it, passes over whole gradients, and the program's own time.
_ONE: dict[str, Bounds] = {
    "traffic": (0.005, 20.0),
    "optimizer": (0.005, 20.0),
    "overhead_per_layer": (1e-6, 0.1),
    "overhead_per_action": (1e-6, 0.1),
    "overhead_per_gather": (1e-7, 0.1),
}
_UPDATE: dict[str, Bounds] = {"overhead_per_param": (1e-7, 0.1), "overhead_per_step": (1e-6, 1.0)}
_CROWD = "crowd"  # no curve: by how much the program's own time is longer among several
# Of several: what gathers and collectives cost in a step.
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


def fit_link(links: Mapping[str, Sequence[tuple[int, float]]], ranks: int) -> tuple[float, float]:
    """Bandwidth and latency that explain the timings of all collectives best."""
    gathers = [(size * (ranks - 1) / ranks, seconds) for size, seconds in links["all_gather"]]
    latency, bandwidth = fit_line(gathers)
    rows = [(kind, size, s) for kind, timed in links.items() for size, s in timed]
    curves = Curves(**{**asdict(Curves()), **_MEASURED})

    def predict(values: Mapping[str, float]) -> list[float]:
        hardware = _with_link(values["bandwidth"], values["latency"])
        return [_transfer(kind, size, ranks, hardware, curves) for kind, size, _ in rows]

    found = fit(
        {"bandwidth": bandwidth, "latency": max(latency, 1e-7)},
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
    one = Figure(value=1.0, source="none: it cancels out")
    link = Link(
        bandwidth=Figure(value=bandwidth, source=_TRIED),
        latency=Figure(value=latency, source=_TRIED),
    )
    return Hardware(name="", device_names=(), peak_flops={}, memory_bytes=one, link=link)


def fit_curves(together: Sequence[Mapping[str, Any]], hardware: Hardware, on_gpu: bool) -> Curves:
    """Fitted efficiency curves of matrix products, attention and memory-bound operators.

    On a GPU the others are those of published runs.
    """
    start = asdict(fitted()) | _MEASURED if on_gpu else asdict(Curves()) | _MEASURED | _ON_CPU
    first = together[0]
    products = [
        (MatMul(m, k, n), dtype, seconds)
        for dtype, rows in first["matmul"].items()
        for m, k, n, seconds in rows
        if dtype != "fp16" or "bf16" not in first["matmul"]
    ]
    values = fit(
        start,
        _PRODUCTS,
        lambda v: [matmul_seconds(p, t, hardware, Curves(**v)) for p, t, _ in products],
        [seconds for *_, seconds in products],
    )
    heads = [
        (Attention(b, h, h, s, size), backward, seconds[backward])
        for b, h, s, size, *seconds in first["attention"]
        for backward in (False, True)
        if seconds[backward] > 0
    ]
    dtype: Any = "bf16" if on_gpu else "fp32"
    values = fit(
        values,
        _FLASH,
        lambda v: [
            attention_seconds(a, dtype, hardware, Curves(**v), ENGINE, back) for a, back, _ in heads
        ],
        [seconds for *_, seconds in heads],
    )
    moves = [(size // 4, seconds) for _, size, seconds in first["traffic"]]
    values = fit(
        values,
        _TRAFFIC,
        lambda v: [traffic_seconds(n, "fp32", hardware, Curves(**v)) for n, _ in moves],
        [seconds for _, seconds in moves],
    )
    return Curves(**values)


def fit_program(
    curves: Curves, hardware: Hardware, timed: Mapping[SmallRun, Timed]
) -> tuple[Curves, Hardware]:
    """The curves with the host program's own time, fitted to the steps of small runs.

    The hardware comes with the rates at which the whole update goes, norm and clipping included,
    for those of Adam alone, and with the factor on the program's time of a process alone.
    """
    settings = {run: Setting.from_config(run.config()) for run in timed}
    alone = {settings[run]: one for run, one in timed.items() if run.ranks == 1}
    several = {settings[run]: one for run, one in timed.items() if run.ranks > 1}
    values = {**asdict(curves), _CROWD: 1.0}
    hardware, values = _fit_updates(values, hardware, alone)

    def one(v: Mapping[str, float]) -> list[float]:
        fitted, there = _applied(v, _without_adam(hardware))
        return [step_time(setting, there, fitted).seconds for setting in alone]

    def all_of_them(v: Mapping[str, float]) -> list[float]:
        fitted, there = _applied(v, hardware)
        return [step_time(setting, there, fitted).seconds for setting in several]

    if alone:
        # What the program does once a step is in the update, and in the reduction before it.
        after = {name: values[name] for name in _UPDATE}
        reduced = [t.seconds - t.update for t in alone.values()]
        values = fit(values, {**_ONE, **_UPDATE}, one, reduced)
        values |= {name: values[name] + after[name] for name in _UPDATE}
    if several:
        values = fit(values, _SEVERAL, all_of_them, [t.seconds for t in several.values()])
    return _applied(values, hardware)


def _fit_updates(
    values: dict[str, float], hardware: Hardware, alone: Mapping[Setting, Timed]
) -> tuple[Hardware, dict[str, float]]:
    """The parameters a second that `engine.step` updates, and its own time besides.

    It takes the norm, clips, runs Adam and copies the weights back. The rates are those of the
    largest models, the program's time is that of the small ones.
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
    host = hardware.host.model_copy(update={"adam_params": rates["cpu"]})
    return hardware.model_copy(update={"adam_params": rates["none"], "host": host}), values


def _without_adam(hardware: Hardware) -> Hardware:
    assert hardware.host
    never = Figure(value=1e18, source="none: no limit")
    host = hardware.host.model_copy(update={"adam_params": never})
    return hardware.model_copy(update={"adam_params": never, "host": host})


def _applied(values: Mapping[str, float], hardware: Hardware) -> tuple[Curves, Hardware]:
    """Curves and hardware by what `fit_program` fits."""
    crowd = values[_CROWD]
    known = {name: value for name, value in values.items() if name != _CROWD}
    fitted = Curves(**{**known, **{name: values[name] * crowd for name in _OWN}})
    if hardware.cores is None:
        return fitted, hardware
    own = Figure(value=float(f"{1 / crowd:.4g}"), source=hardware.cores.count.source)
    alone = {**hardware.cores.alone, "overhead": own}
    cores = Cores(count=hardware.cores.count, alone=alone)
    return fitted, hardware.model_copy(update={"cores": cores})
