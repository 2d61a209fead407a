"""How unusual a number is among earlier ones (no torch)."""

import math
from collections.abc import Sequence
from statistics import median

FEWEST = 16  # earlier values from which a score can be told
_NORMAL = 1.4826  # standard deviation of a normal distribution / its median absolute deviation
_LEAST = 1e-3  # smallest deviation, as a share of the median: equal values are no reason to stop


def robust_score(value: float, earlier: Sequence[float]) -> float:
    """Return how many robust standard deviations a value lies above the median of earlier ones.

    The deviation is 1.4826 times their median absolute deviation, so earlier spikes hardly change
    it. 0 if there are fewer than FEWEST values.
    """
    if len(earlier) < FEWEST:
        return 0.0
    middle = median(earlier)
    deviation = _NORMAL * median(abs(x - middle) for x in earlier)
    return (value - middle) / max(deviation, _LEAST * abs(middle), math.ulp(1.0))
