"""Layers to stages, against all the ways there are."""

import random
import time
from itertools import combinations, pairwise

import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.schedule.partition import partition

pytestmark = pytest.mark.pure


def by_brute_force(costs: list[int], num_stages: int) -> tuple[range, ...]:
    """The best of all partitions, by the rule in `partition`'s docstring."""

    def rank(cuts: tuple[int, ...]) -> tuple:
        stages = [costs[a:b] for a, b in pairwise((0, *cuts, len(costs)))]
        sums = [sum(stage) for stage in stages]
        return max(sums), sum(s**2 for s in sums), sum(len(stage) ** 2 for stage in stages), cuts

    best = min(combinations(range(1, len(costs)), num_stages - 1), key=rank)
    return tuple(range(a, b) for a, b in pairwise((0, *best, len(costs))))


def test_partition_equals_brute_force() -> None:
    draw = random.Random(0)
    kinds = [
        lambda: draw.randint(0, 4),  # many ties, and layers that cost nothing
        lambda: draw.randint(0, 10**20),  # no exact floats
    ]
    for trial in range(300):
        costs = [kinds[trial % 2]() for _ in range(draw.randint(1, 8))]
        num_stages = draw.randint(1, len(costs))
        assert partition(costs, num_stages) == by_brute_force(costs, num_stages), costs


def test_partition_of_examples() -> None:
    assert partition([1] * 8, 4) == (range(0, 2), range(2, 4), range(4, 6), range(6, 8))
    assert partition([1] * 7, 3) == (range(0, 2), range(2, 4), range(4, 7))
    assert partition([0] * 5, 2) == (range(0, 2), range(2, 5))
    stages = partition([73, *[10] * 126, 31], 64)
    assert sum(map(len, stages)) == 128 and stages[0] == range(0, 1)
    # A costly head: its stage gets fewer layers.
    assert [len(stage) for stage in partition([1, *[10] * 12, 30], 4)] == [4, 4, 4, 2]


def test_large_partition_takes_less_than_a_second() -> None:
    draw = random.Random(0)
    costs = [draw.randint(10**12, 2 * 10**12) for _ in range(70)]
    start = time.process_time()
    stages = partition(costs, 32)  # pp 8 x 4 stages per rank
    assert time.process_time() - start < 1
    assert [layer for stage in stages for layer in stage] == list(range(70))


@pytest.mark.parametrize("num_stages", [0, 4])
def test_more_stages_than_layers_are_refused(num_stages: int) -> None:
    with pytest.raises(ConfigError, match=f"3 layers .* {num_stages} pipeline.*at most 3 stages"):
        partition([1, 1, 1], num_stages)
