"""The matrices of hidden parameters, and their home ranks (floor 0, no torch)."""

import heapq
from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple

from parallel3d.model.spec import ParamSpec


class NewtonSchulz(NamedTuple):
    """The work on each hidden matrix in a step: its steps, and their precision."""

    steps: int
    precision: Literal["fp32", "bf16"] = "fp32"
    per_head: bool = False

    def flops(self, cost: int, smallest: int) -> int:
        """Return the FLOPs for a matrix of n = `smallest` and n^2 m = `cost`.

        A step multiplies [n, m] by its transpose, the product by itself, and the sum by [n, m].
        """
        return self.steps * (4 * cost + 2 * smallest**3)


def matrix_view(spec: ParamSpec, per_head: bool) -> tuple[int, ...]:
    """Return a parameter's shape as a stack of matrices: [*stack, rows, columns].

    A matrix maps columns to rows. Fused matrices (q, k, v; gate, up) are stacked already. With
    `per_head` the rows of each head are a matrix, where the parameter's rows consist of heads.
    """
    *stack, rows, columns = spec.shape
    if per_head and spec.units is not None:
        stack = [*stack, spec.units]
        rows = rows // spec.units
    return *stack, rows, columns


def newton_schulz_cost(rows: int, columns: int) -> int:
    """Return n^2 m of a matrix whose smaller dim is n; products of Newton-Schulz are that large."""
    return min(rows, columns) ** 2 * max(rows, columns)


def deal(costs: Sequence[int], homes: int) -> list[int]:
    """Return the home of each matrix by longest processing time (Graham 1969, section 4).

    The most expensive matrix that is left goes to the home with the least work.
    """
    loads = [(0, home) for home in range(homes)]
    dealt = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, home = heapq.heappop(loads)
        dealt[index] = home
        heapq.heappush(loads, (load + costs[index], home))
    return dealt


@lru_cache(maxsize=4096)
def imbalance(costs: tuple[int, ...], homes: int) -> float:
    """Return the work of the busiest home relative to the mean; 1 if there is no work."""
    loads = [0] * homes
    for cost, home in zip(costs, deal(costs, homes), strict=True):
        loads[home] += cost
    return max(loads) * homes / sum(costs) if costs else 1.0


def matrices_of(specs: Iterable[ParamSpec], per_head: bool) -> list[tuple[int, int]]:
    """Return rows and columns of every hidden matrix."""
    views = [matrix_view(spec, per_head) for spec in specs if spec.role == "hidden"]
    return [(view[-2], view[-1]) for view in views for _ in range(prod(view[:-2]))]
