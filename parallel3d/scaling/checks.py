"""Conditions on the points to which a law is fitted."""

import numpy as np

from parallel3d.base.errors import ConfigError
from parallel3d.scaling.points import Array, Points

SAME = 1e-3  # sizes and tokens that differ by less, relative, are one
SAME_BUDGET = 0.05  # the same of budgets: runs end with a whole step
# Of each law: what must differ, and in how many values.
_NEEDS = {
    "parametric": (("params", 3), ("tokens", 3), ("flops", 2)),
    "over-training": (("flops", 3), ("tokens per parameter", 2)),
    "envelope": (("flops", 4),),
}
_WORDS = {
    "params": "model sizes", "tokens": "numbers of tokens", "flops": "FLOP budgets",
    "tokens per parameter": "ratios of tokens to parameters",
}  # fmt: skip


def groups(values: Array, same: float = SAME) -> list[np.ndarray]:
    """Indices of values that are equal to within `same` (relative), group by group, ascending."""
    order = np.argsort(values, kind="stable")
    cuts = np.flatnonzero(np.diff(np.log(values[order])) > same) + 1
    return np.split(order, cuts)


def check(points: Points, law: str, num_parameters: int) -> None:
    """Raise ConfigError if the points cannot tell the law's parameters, whatever the fit says.

    Two sizes say nothing of a curve with three unknowns, however many runs there are of each.
    """
    place = f"{len(points)} points"
    if len(points) < num_parameters:
        raise ConfigError(
            f"{place}: fewer than the {num_parameters} parameters of the {law} law; add runs"
            f"{_said(points)}"
        )
    for what, least in _NEEDS[law]:
        values = points.tokens / points.params
        if what != "tokens per parameter":
            values = getattr(points, what)
        found = groups(values, SAME_BUDGET if what == "flops" else SAME)
        if len(found) < least:
            raise ConfigError(
                f"{place}: {len(found)} of {_WORDS[what]} ({_few(values, found)}); the {law} law "
                f"needs {least} or more; add runs with others{_said(points)}"
            )
    if np.ptp(np.log(points.loss)) < 1e-9:
        raise ConfigError(
            f"{place}: all have the loss {points.loss[0]:g}; give the loss of each run's end, "
            "with all its digits"
        )


def _few(values: Array, found: list[np.ndarray]) -> str:
    return ", ".join(f"{values[group[0]]:.4g}" for group in found[:6])


def _said(points: Points) -> str:
    """What was dropped: the likely reason for too few."""
    if not points.dropped:
        return ""
    return f"; dropped were {', '.join(f'{d.row} ({d.reason})' for d in points.dropped[:4])}"
