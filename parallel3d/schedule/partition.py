"""Assigns layers to stages, balanced by cost."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from parallel3d.base.errors import ConfigError


def partition(costs: Sequence[int], num_stages: int) -> tuple[range, ...]:
    """Return the layers of each stage, with the least possible cost of the costliest stage.

    Stages are contiguous and not empty. Ties go to the most even partition (least squared costs,
    then squared layer counts), then to the one with the shortest first stages, which hold
    activations longest.
    """
    num_layers = len(costs)
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(
            f"{num_layers} layers (embedding and head counted) cannot fill {num_stages} pipeline "
            f"stages; use at most {num_layers} stages (pp x stages_per_rank) or more layers"
        )
    before = [0, *accumulate(costs)]  # cost of the layers before layer i
    limit = _least_maximum(before, num_stages)
    # best[i] is the most even way to put layers i.. on the stages from `first` to the last:
    # (squared costs, squared counts, end of each stage)
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {num_layers: (0, 0, ())}
    for first in reversed(range(num_stages)):
        longer = {}
        for start in range(first, num_layers):
            if before[start] > first * limit:
                break  # the stages before this one would exceed the limit
            choices = []
            for end in range(start + 1, num_layers + 1):
                if (cost := before[end] - before[start]) > limit:
                    break
                if end in best:
                    squared_costs, squared_counts, ends = best[end]
                    counts = (end - start) ** 2 + squared_counts
                    choices.append((cost**2 + squared_costs, counts, (end, *ends)))
            if choices:
                longer[start] = min(choices)
        best = longer
    ends = best[0][-1]
    return tuple(map(range, (0, *ends), ends))


def _least_maximum(before: list[int], num_stages: int) -> int:
    """Return the least possible cost of the costliest stage, by bisection."""

    def fits(limit: int) -> bool:
        start = 0
        stages = 1
        for i in range(1, len(before)):
            if before[i] - before[start] > limit:
                start = i - 1
                stages = stages + 1
        return stages <= num_stages

    low = max(b - a for a, b in pairwise(before))
    high = before[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low
