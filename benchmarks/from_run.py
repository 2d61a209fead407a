"""How well one published run predicts the others of its source: python -m benchmarks.from_run FILE.

Each row of a source with three rows or more, of one chip and number format, is given in turn. Four
predictions of the others are compared: without it, with the whole step scaled by the given row's
measured over planned time, and with only computes and the waits for them scaled, by all of the
factor or by half of it. Curves are those fitted without the row's group.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

from benchmarks.published import fits
from benchmarks.published.rows import PublishedRun, read
from parallel3d.base.errors import ConfigError
from parallel3d.plan.time.step import StepTime, step_time

LEAST_ROWS = 3
BOUNDS = (0.5, 2.0)
"""The least and the largest factor on computes."""
Known = tuple[float, StepTime]  # measured seconds, and the planned step


def computes(time: StepTime) -> float:
    """The planned seconds of computes and of the waits for other ranks' computes."""
    return time.parts["compute"] + time.parts["bubble"]


def whole_step(given: Known, other: StepTime) -> float:
    """The other run's step if all of it is as much slower as the given one."""
    measured, time = given
    return other.seconds * measured / time.seconds


def computes_only(given: Known, other: StepTime) -> float:
    """The other run's step if its computes alone are as much slower as the given one's."""
    measured, time = given
    factor = 1 + (measured - time.seconds) / computes(time)
    factor = min(max(factor, BOUNDS[0]), BOUNDS[1])
    return other.seconds + (factor - 1) * computes(other)


def half_of_it(given: Known, other: StepTime) -> float:
    """The other run's step if half of the factor on computes, geometrically, is the source's.

    The rows of a source differ from each other about as much as sources do.
    """
    _, time = given
    full = computes_only(given, time) - time.seconds
    factor = (1 + full / computes(time)) ** 0.5
    return other.seconds + (factor - 1) * computes(other)


def unchanged(given: Known, other: StepTime) -> float:
    """The other run's planned step."""
    return other.seconds


METHODS: tuple[Callable[[Known, StepTime], float], ...] = (
    unchanged,
    whole_step,
    computes_only,
    half_of_it,
)


def error_of(method: Callable[[Known, StepTime], float], runs: Sequence[Known]) -> float:
    """The mean relative error of predicting each run from each other one."""
    errors = []
    for given in runs:
        for measured, time in runs:
            if time is not given[1]:
                errors.append(abs(method(given, time) / measured - 1))
    return mean(errors)


def known_runs(rows: Sequence[PublishedRun]) -> dict[str, list[Known]]:
    """The measured and planned steps of each source, chip and number format."""
    by_kind = defaultdict[str, list[Known]](list)
    for row in rows:
        if row.seconds is None or row.has_experts:
            continue
        try:
            time = step_time(row.setting, row.hardware, fits.without(row.group))
        except ConfigError:
            continue
        kind = f"{row.source}, {row.chip}, {row.setting.workload.precision}"
        by_kind[kind].append((row.seconds, time))
    return {kind: runs for kind, runs in by_kind.items() if len(runs) >= LEAST_ROWS}


def main() -> None:
    """Print the mean error of each method by source, and over the sources."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="published runs")
    rows, _ = read(parser.parse_args().file)
    names = [method.__name__ for method in METHODS]
    print(f"{'source, chip, format':<60} rows  {'  '.join(names)}")
    totals = []
    for kind, runs in known_runs(rows).items():
        each = [error_of(method, runs) for method in METHODS]
        totals.append(each)
        print(f"{kind:<60} {len(runs):>4}  {'  '.join(f'{100 * e:.1f} %' for e in each)}")
    means = [mean(column) for column in zip(*totals, strict=True)]
    print(f"{'mean over sources':<60} {'':>4}  {'  '.join(f'{100 * e:.1f} %' for e in means)}")


if __name__ == "__main__":
    main()
