"""The part of a mixture that gives each sample: a pure function of the sample's global index.

The shares are whole numbers a_1, a_2, ... with the sum D, and a pattern of D samples is repeated.
In it the j-th sample of part s (from 0) has its window: not before index floor(j D / a_s), not
after ceil((j + 1) D / a_s) - 1. The part is taken whose open window closes
first; all windows are then met, and every prefix of n samples has floor(n a_s / D) or
ceil(n a_s / D) of part s (Baruah, Cohen, Plaxton and Varvel 1996, "Proportionate progress").
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import reduce
from math import gcd, lcm

import numpy as np

# Shares that are no multiples of one part in so many are rounded to it.
MAX_PATTERN = 2**16


def whole_shares(weights: Sequence[float]) -> list[int]:
    """Whole numbers in the proportions of the weights, read as decimals.

    Their sum is at most MAX_PATTERN: where that is too coarse, shares are rounded to that many
    parts by the largest remainders, none to 0.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    shares = [int(weight * lcm(*(w.denominator for w in exact))) for weight in exact]
    shares = [share // reduce(gcd, shares) for share in shares]
    if sum(shares) <= MAX_PATTERN:
        return shares
    ideal = [Fraction(share * MAX_PATTERN, sum(shares)) for share in shares]
    rounded = [max(1, int(share)) for share in ideal]
    while sum(rounded) != MAX_PATTERN:
        # The largest remainders get the rest; the others pay for parts that are raised to 1.
        step = 1 if sum(rounded) < MAX_PATTERN else -1
        owed = [(step * (ideal[s] - n), s) for s, n in enumerate(rounded) if n + step >= 1]
        rounded[max(owed)[1]] += step
    return rounded


class Mixing:
    """A mapping from global sample index to a part of a mixture and a place in that part.

    The same on every mesh, for every seed; nothing in it moves.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.shares = np.array(whole_shares(weights), dtype=np.int64)
        self.period = int(self.shares.sum())
        self._part = _pattern([int(share) for share in self.shares])
        # How many samples of the same part the pattern has before each of its places.
        self._before = np.empty(self.period, dtype=np.int64)
        for part, share in enumerate(self.shares):
            self._before[self._part == part] = np.arange(share)

    def assign(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For global indices [n], the parts and the places in the parts' own orders."""
        block, place = np.divmod(index, self.period)
        part = self._part[place]
        return part, block * self.shares[part] + self._before[place]

    def index_of(self, part: int, place: int) -> int:
        """The global index of a place in a part's order."""
        block, before = divmod(place, int(self.shares[part]))
        return block * self.period + int(np.flatnonzero(self._part == part)[before])


def _pattern(shares: list[int]) -> np.ndarray:
    period = sum(shares)
    pattern = np.empty(period, dtype=np.int64)
    given = [0] * len(shares)
    for index in range(period):
        # The window of sample j closes at ceil((j + 1) D / a) - 1.
        _, part = min(
            (-(-(given[s] + 1) * period // share), s)
            for s, share in enumerate(shares)
            if given[s] * period // share <= index
        )
        pattern[index] = part
        given[part] += 1
    return pattern
