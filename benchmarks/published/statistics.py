"""Measures of prediction error: errors, rank correlation, regret, and the constant to beat."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import exp, log, sqrt
from typing import NamedTuple


class PredictionErrors(NamedTuple):
    """Relative errors of predicted seconds, as fractions of the measured seconds."""

    mean: float
    worst: float
    bias: float


def errors(predicted: Sequence[float], measured: Sequence[float]) -> PredictionErrors | None:
    """Mean and largest absolute error, and the mean error with its sign; None without numbers."""
    signed = [(p - m) / m for p, m in zip(predicted, measured, strict=True)]
    if not signed:
        return None
    sizes = [abs(error) for error in signed]
    return PredictionErrors(sum(sizes) / len(sizes), max(sizes), sum(signed) / len(signed))


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Spearman's rho: Pearson's correlation of the ranks, ties at their mean rank.

    None for fewer than three pairs, or where all of one side are equal.
    """
    if len(left) < 3:
        return None
    a = _ranks(left)
    b = _ranks(right)
    mean = (len(a) + 1) / 2
    shared = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    spread = sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    return shared / spread if spread else None


def _ranks(values: Sequence[float]) -> list[float]:
    """1 for the smallest; equal values share the mean of their ranks."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for i in order[start : end + 1]:
            ranks[i] = (start + end) / 2 + 1
        start = end + 1
    return ranks


class Choice(NamedTuple):
    """One way in which a source ran a model: `task` is what was run, `mesh` how it was run.

    `way`: mesh, microbatch, recomputation and the like; runs of one way are averaged.
    """

    task: Hashable
    mesh: Hashable
    way: Hashable
    predicted: float
    measured: float


def regrets(choices: Iterable[Choice]) -> list[float]:
    """For each task with several meshes, how much slower the predicted best is than the best.

    0 where the favourite is the fastest that was measured; 0.1 where it took 10 % longer.
    """
    tasks: dict[Hashable, list[Choice]] = defaultdict(list)
    for choice in choices:
        tasks[choice.task].append(choice)
    found = []
    for same in tasks.values():
        if len({choice.mesh for choice in same}) < 2:
            continue
        ways: dict[Hashable, list[Choice]] = defaultdict(list)
        for choice in same:
            ways[choice.way].append(choice)
        times = [
            (sum(c.predicted for c in runs) / len(runs), sum(c.measured for c in runs) / len(runs))
            for runs in ways.values()
        ]
        favourite = min(times)[1]
        found.append(favourite / min(measured for _, measured in times) - 1)
    return found


def constants(
    efficiencies: Iterable[tuple[str, Hashable, float]],
) -> Mapping[tuple[str, Hashable], float]:
    """(group, device) -> the constant efficiency that the *other* groups of that device had.

    `efficiencies`: group, device and the fraction of its peak of each run. Groups weigh equally;
    means are geometric, since errors are ratios. Where no other group has the device, the other
    groups of all devices stand in.
    """
    logs: dict[tuple[str, Hashable], list[float]] = defaultdict(list)
    for group, device, efficiency in efficiencies:
        logs[group, device].append(log(efficiency))
    means = {key: sum(values) / len(values) for key, values in logs.items()}
    found = {}
    for group, device in means:
        others = {key: mean for key, mean in means.items() if key[0] != group}
        same = [mean for key, mean in others.items() if key[1] == device]
        if peers := same or list(others.values()):
            found[group, device] = exp(sum(peers) / len(peers))
    return found
