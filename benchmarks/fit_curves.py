"""Fit the planner's efficiency curves on published runs, and once more without each group.

    python -m benchmarks.fit_curves TABLE.csv [--out parallel3d/plan/time/curves.json] [--quick]
    python -m benchmarks.fit_curves TABLE.csv --never GROUP --default NAME=VALUE --out FILE.json

Least squares of the logarithm of the step time; every group of sources weighs the same, whatever
its number of rows. One set of parameters for all devices and programs: no constant of a source.
A prior holds a parameter that few groups determine near its default. Writes the curves fitted on
all groups, with which the planner plans, and for each group those that never saw it, by which
`benchmarks.published` reports that group; and benchmarks/published/development.csv, the fitted
rows.
Needs scipy (`pip install 'parallel3d[scaling]'`).
"""

import argparse
import hashlib
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from scipy.optimize import lsq_linear

from benchmarks.published import neighbours
from benchmarks.published.rows import ROWWISE, PublishedRun, read
from benchmarks.published.statistics import errors
from parallel3d.plan.time.operators import FILE, Curves
from parallel3d.plan.time.step import lower_bound, step_time

# What is fitted, with bounds. The rest of Curves stays at its defaults: these rows do not move it.
BOUNDS = {
    "matmul": (0.7, 1.0),
    "eager": (0.7, 1.0),
    "compiled": (0.7, 1.0),
    "fp8": (0.5, 1.0),
    "flash": (0.2, 1.0),
    "ported": (0.4, 1.0),
    "traffic": (0.5, 1.0),
    "link": (0.2, 1.0),
    "network": (0.2, 1.0),
    "latency": (0.3, 1.5),
    "overlap": (0.2, 1.0),
    "tensor_overlap": (0.2, 1.0),
    "overhead_per_collective": (2e-6, 5e-5),
    "overhead_per_crossing": (1e-5, 2e-4),
    "overhead_per_launch": (1e-5, 5e-4),
    "overhead_per_layer": (2e-5, 2e-3),
    "host_overlap": (1.0, 20.0),
}
# Fitted by itself, on the rows with experts: each device's are predicted by those of the others.
OF_EXPERTS = {"overhead_per_experts": (1e-4, 1e-2)}
EXPERTS = Path(__file__).with_name("published") / "experts.csv"
# How much one e-fold of a parameter weighs beside an e-fold of a group's error: as if groups erred
# by some 15 %, and the defaults were known to some 20 %.
PRIOR = 0.7
TYPICAL = 0.1
"""The error, in e-folds, from which on Huber's loss is linear: that of a median row."""
REWEIGHTED = 8
ROUNDS = 3
STEP = 1.02
"""The factor on a parameter whose effect is a derivative."""
# Of a source with many rows alike, every so many-th is fitted; all are reported.
EVERY = {"vtrain_single": 24, "llm_foundry": 2, "nvidia_dgxc": 2}


def sample(rows: Iterable[PublishedRun]) -> list[PublishedRun]:
    """The rows that are fitted: those with a time, and of long tables a part."""
    seen: dict[str, int] = defaultdict(int)
    taken = []
    for row in rows:
        if ROWWISE in row.notes:  # reported, but of a kind that the formulas do not have
            continue
        seen[row.source] += 1
        if row.seconds is not None and seen[row.source] % EVERY.get(row.source, 1) == 0:
            taken.append(row)
    return taken


def digests(rows: Iterable[PublishedRun]) -> dict[str, str]:
    """group -> a digest of its rows, by which a test proves what a fit saw."""
    lines: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        lines[row.group].append(f"{row.source}:{row.line}:{row.seconds:.6g}")
    return {
        group: hashlib.sha256("\n".join(sorted(text)).encode()).hexdigest()[:16]
        for group, text in sorted(lines.items())
    }


def linearised(
    rows: Sequence[PublishedRun], curves: Curves, names: Iterable[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of the planned seconds [rows], and derivatives by those of the parameters.

    The derivatives [rows, names] are of the lower bound, which takes a fraction of the time.
    """

    def bound(changed: Curves) -> np.ndarray:
        return np.log([lower_bound(row.setting, row.hardware, changed) for row in rows])

    times = np.log([step_time(row.setting, row.hardware, curves).seconds for row in rows])
    here = bound(curves)
    columns = []
    for name in names:
        more = replace(curves, **{name: getattr(curves, name) * STEP})
        columns.append((bound(more) - here) / math.log(STEP))
    return times, np.array(columns).T


def solved(
    rows: Sequence[PublishedRun],
    line: tuple[np.ndarray, np.ndarray],
    curves: Curves,
    bounds: Mapping[str, tuple[float, float]],
    defaults: Curves,
    typical: float = TYPICAL,
) -> Curves:
    """The curves with the least weighted errors, by Huber's loss, and the least pull of the prior.

    `line`: the rows linearised at `curves`. A row that is further off than `typical` counts by its
    error instead of its square.
    """
    counts: dict[str, int] = defaultdict(int)
    for row in rows:
        counts[row.group] += 1
    weights = np.array([1 / math.sqrt(counts[row.group]) for row in rows])
    times, slopes = line
    errors_now = np.log([row.seconds or 1.0 for row in rows]) - times
    here = np.log([getattr(curves, name) for name in bounds])
    default = np.log([getattr(defaults, name) for name in bounds])
    low, high = (np.log([pair[side] for pair in bounds.values()]) for side in (0, 1))
    trust = np.ones(len(rows))
    for _ in range(REWEIGHTED):
        own = weights * trust
        moved = lsq_linear(
            np.vstack([slopes * own[:, None], PRIOR * np.eye(len(bounds))]),
            np.concatenate([errors_now * own, PRIOR * (default - here)]),
            bounds=(low - here - 1e-9, high - here + 1e-9),
        ).x
        off = np.abs(errors_now - slopes @ moved)
        trust = np.sqrt(np.minimum(1.0, typical / np.maximum(off, 1e-9)))
    values = (float(value) for value in np.exp(here + moved))
    return replace(curves, **dict(zip(bounds, values, strict=True)))


def of_experts(curves: Curves, defaults: Curves) -> tuple[dict[str, float], Curves]:
    """The host's time of experts without the rows of each device, and the curves with all.

    By plain squares: few rows have divided experts, and none is left to a tail.
    """
    rows = [replace(row, group=row.hardware.name) for row in read(EXPERTS)[0]]

    def fit(own: Sequence[PublishedRun]) -> Curves:
        found = curves
        for _ in range(ROUNDS):
            line = linearised(own, found, OF_EXPERTS)
            found = solved(own, line, found, OF_EXPERTS, defaults, math.inf)
        return found

    without = {}
    for device in sorted({row.group for row in rows}):
        others = [row for row in rows if row.group != device]
        without[device] = rounded(fit(others))["overhead_per_experts"]
    return without, fit(rows)


def rounded(curves: Curves) -> dict[str, float]:
    """The parameters, to five digits."""
    return {name: float(f"{value:.5g}") for name, value in asdict(curves).items()}


def report(rows: Sequence[PublishedRun], curves: Curves) -> dict[str, tuple[int, float, float]]:
    """Per source: rows, mean error, bias."""
    by: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        seconds = step_time(row.setting, row.hardware, curves).seconds
        by[row.source].append((seconds, row.seconds or 1.0))
    found = {}
    for source, pairs in by.items():
        own = errors([p for p, _ in pairs], [m for _, m in pairs])
        assert own
        found[source] = (len(pairs), own.mean, own.bias)
    return found


def show(title: str, curves: Curves, table: Mapping[str, tuple[int, float, float]]) -> None:
    """Prints a fit."""
    print(f"\n{title}")
    print("  " + ", ".join(f"{n} {getattr(curves, n):.3g}" for n in BOUNDS))
    for source, (count, mean, bias) in table.items():
        print(f"  {source:28s} {count:5d} rows  mean {mean:6.1%}  bias {bias:+6.1%}", flush=True)


def main() -> None:
    """Fits all groups, then all but each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table")
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--quick", action="store_true", help="only the fit on all groups")
    parser.add_argument("--groups", nargs="+", help="only these are left out in turn")
    parser.add_argument("--start", type=Path, help="curves of an earlier fit to begin from")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--never", help="a group that no fit sees and no error counts")
    parser.add_argument("--default", metavar="NAME=VALUE", help="in place of that of Curves")
    arguments = parser.parse_args()
    began = time.perf_counter()
    rows = sample(row for row in read(arguments.table)[0] if row.group != arguments.never)
    start = defaults = Curves()
    if arguments.default:
        name, value = arguments.default.split("=")
        start = defaults = replace(defaults, **{name: float(value)})
    if arguments.start:
        earlier = json.loads(arguments.start.read_text())["all"]["curves"]
        start = replace(start, **{name: earlier[name] for name in BOUNDS if name in earlier})
    for _ in range(arguments.rounds - 1):
        start = solved(rows, linearised(rows, start, BOUNDS), start, BOUNDS, defaults)
    times, slopes = linearised(rows, start, BOUNDS)
    everything = solved(rows, (times, slopes), start, BOUNDS, defaults)
    show(f"all groups, {len(rows)} rows", everything, report(rows, everything))
    by_device, everything = of_experts(everything, defaults)
    saw = digests(rows)
    result = {"all": {"curves": rounded(everything), "saw": saw}, "without": {}}
    result["experts_without"] = by_device
    means = []
    for group in [] if arguments.quick else arguments.groups or saw:
        seen = [i for i, row in enumerate(rows) if row.group != group]
        others = [rows[i] for i in seen]
        line = (times[seen], slopes[seen])
        curves = solved(others, line, start, BOUNDS, defaults)
        own = [row for row in rows if row.group == group]
        table = report(own, curves)
        show(f"{group}, fitted without it", curves, table)
        means.append(sum(count * mean for count, mean, _ in table.values()) / len(own))
        result["without"][group] = {"curves": rounded(curves), "saw": digests(others)}
    if means:
        print(f"\nmean of {len(means)} groups, each fitted without it: {np.mean(means):.2%}")
    if not arguments.quick or arguments.out != FILE:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if arguments.out == FILE and not arguments.quick:
        neighbours.write(rows)  # the look-up beside the fit knows the same rows
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
