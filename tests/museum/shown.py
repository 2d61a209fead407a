"""What a loss curve shows of an exhibit, where only other runs' curves are there to compare.

Who looks at a curve has no right run of the same seed beside it: that would be `verify`. The curve
is drawn in tenths of the run. It shows a mistake if it has no number somewhere, or if a tenth lies
outside what five right runs of other seeds (other first weights, another order of samples) have
there, by more than these differ among themselves. A right run of the same seed as the exhibits'
is the rule's own test: it shows nothing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("curves.json")
STEPS = 100
PARTS = 10
Curve = tuple[float | None, ...]  # mean losses of tenths, in nats; None where one has no number
StoredCurves = Mapping[str, Any]


@dataclass(frozen=True)
class Mark:
    """The tenth of a loss curve that is farthest from the right runs' curves, counted from 0.

    `loss` is its mean loss there, `low` and `high` those of the right runs; `beyond` how far it
    lies outside of them, in their range's width (inf without a number).
    """

    tenth: int
    loss: float | None
    low: float
    high: float
    beyond: float

    @property
    def shows(self) -> bool:
        """Whether the curve shows a mistake."""
        return self.beyond > 1


def mark_of(curve: Curve, right: Sequence[Curve]) -> Mark:
    """What a curve shows beside those of right runs; it may be the last tenths of a run alone."""
    marks = []
    first = PARTS - len(curve)
    for tenth, loss in enumerate(curve, first):
        others = [other[tenth] for other in right if other[tenth] is not None]
        numbers = [x for x in others if x is not None]
        low = min(numbers)
        high = max(numbers)
        beyond = inf if loss is None else max(low - loss, loss - high) / (high - low)
        marks.append(Mark(tenth, loss, low, high, beyond))
    return max(marks, key=lambda mark: mark.beyond)


def stored() -> StoredCurves:
    """The measured curves: `right` by hall, the exhibits' seed first, and `exhibits` by name."""
    curves: StoredCurves = json.loads(FILE.read_text(encoding="utf-8"))
    return curves


def mark(name: str, curves: StoredCurves) -> Mark | None:
    """What is stored of an exhibit; None where nothing is."""
    of = curves["exhibits"].get(name)
    return of and mark_of(tuple(of["curve"]), curves["right"][of["hall"]][1:])
