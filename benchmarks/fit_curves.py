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
from scipy.optimize import least_squares

from benchmarks.published import neighbours
from benchmarks.published.rows import ROWWISE, PublishedRun, read
from benchmarks.published.statistics import errors
from parallel3d.plan.time.operators import FILE, Curves
from parallel3d.plan.time.step import lower_bound, step_time

# What is fitted, with bounds; the rest of Curves stays at its defaults.
BOUNDS = {
    "datasheet": (0.6, 1.0),
    "matmul": (0.7, 1.0),
    "eager": (0.7, 1.0),
    "compiled": (0.7, 1.0),
    "wave": (1e4, 2e7),
    "depth": (1.0, 2000.0),
    "fp8": (0.5, 1.0),
    "flash": (0.2, 1.0),
    "flash_head": (1.0, 200.0),
    "flash_backward": (0.5, 1.0),
    "ported": (0.4, 1.0),
    "traffic": (0.5, 1.0),
    "fused": (0.2, 1.0),
    "optimizer": (0.2, 1.0),
    "link": (0.2, 1.0),
    "network": (0.2, 1.0),
    "congestion": (1e-3, 0.3),
    "latency": (0.3, 1.5),
    "overlap": (0.2, 1.0),
    "tensor_overlap": (0.2, 1.0),
    "overhead_per_operator": (1e-6, 1e-5),
    "overhead_per_collective": (1e-6, 1e-2),
    "overhead_per_layer": (2e-5, 2e-3),
    "host_overlap": (1.0, 20.0),
    "overhead_per_action": (1e-6, 5e-3),
    "overhead_per_gather": (1e-7, 3e-4),
    "overhead_per_step": (1e-4, 5e-2),
}
# How much one e-fold of a parameter weighs beside an e-fold of a group's error: as if groups erred
# by some 15 %, and the defaults were known to some 20 %.
PRIOR = 0.7
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


class Fit:
    """Finds the curves for some rows; `ratio` is the simulated step over its lower bound."""

    def __init__(
        self,
        rows: Sequence[PublishedRun],
        start: Curves,
        names: Sequence[str],
        defaults: Curves | None = None,
    ) -> None:
        self.rows = rows
        self.start = start
        self.names = names
        self.defaults = defaults or Curves()
        counts: dict[str, int] = defaultdict(int)
        for row in rows:
            counts[row.group] += 1
        self.weights = np.array([1 / math.sqrt(counts[row.group]) for row in rows])
        self.measured = np.log([row.seconds or 1.0 for row in rows])
        self.ratio = np.zeros(len(rows))

    def curves(self, x: np.ndarray) -> Curves:
        """The curves of a vector of logarithms."""
        values = (float(value) for value in np.exp(x))
        return replace(self.start, **dict(zip(self.names, values, strict=True)))

    def residuals(self, x: np.ndarray) -> np.ndarray:
        """Weighted errors of the logarithm, then the prior's pull."""
        curves = self.curves(x)
        times = [lower_bound(row.setting, row.hardware, curves) for row in self.rows]
        error = (np.log(times) + self.ratio - self.measured) * self.weights
        default = np.log([getattr(self.defaults, name) for name in self.names])
        return np.concatenate([error, PRIOR * (x - default)])

    def run(self, rounds: int, evaluations: int) -> Curves:
        """Fits, with the bound corrected to the simulated step before each round."""
        low, high = (np.log([BOUNDS[n][side] for n in self.names]) for side in (0, 1))
        x = np.log([getattr(self.start, name) for name in self.names])
        for _ in range(rounds):
            curves = self.curves(x)
            self.ratio = np.array(
                [
                    math.log(
                        step_time(row.setting, row.hardware, curves).seconds
                        / lower_bound(row.setting, row.hardware, curves)
                    )
                    if row.setting.mesh.pp > 1
                    else 0.0
                    for row in self.rows
                ]
            )
            start = np.clip(x, low + 1e-6, high - 1e-6)
            found = least_squares(
                self.residuals,
                start,
                bounds=(low, high),
                max_nfev=evaluations,
                diff_step=1e-3,
                x_scale=0.3,
            )
            x = found.x
        return self.curves(x)


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
    parser.add_argument("--evaluations", type=int, default=5)
    parser.add_argument("--never", help="a group that no fit sees and no error counts")
    parser.add_argument("--default", metavar="NAME=VALUE", help="in place of that of Curves")
    arguments = parser.parse_args()
    began = time.perf_counter()
    rows = sample(row for row in read(arguments.table)[0] if row.group != arguments.never)
    names = list(BOUNDS)
    start = defaults = Curves()
    if arguments.default:
        name, value = arguments.default.split("=")
        start = defaults = replace(defaults, **{name: float(value)})
    if arguments.start:
        earlier = json.loads(arguments.start.read_text())["all"]["curves"]
        start = Curves(**{n: earlier[n] for n in asdict(start) if n in earlier})
    everything = Fit(rows, start, names, defaults).run(2, arguments.evaluations)
    show(f"all groups, {len(rows)} rows", everything, report(rows, everything))
    saw = digests(rows)
    result = {"all": {"curves": rounded(everything), "saw": saw}, "without": {}}
    means = []
    for group in [] if arguments.quick else arguments.groups or saw:
        others = [row for row in rows if row.group != group]
        curves = Fit(others, everything, names, defaults).run(1, arguments.evaluations)
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
