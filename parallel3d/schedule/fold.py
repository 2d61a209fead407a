"""The steady state of a long timeline, in which every rank repeats itself, folded away."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from parallel3d.schedule.action import Op, Span, Spans

MOST = 1_000  # computes that are drawn one by one
_GAP = 0.12  # of the time that is drawn, for each fold
_UNITS = 4.0  # of time, where all times are whole


@dataclass(frozen=True)
class Fold:
    """A cut from `begin` to `end`, in seconds, drawn as a gap of `gap` seconds."""

    begin: float
    end: float
    gap: float
    num_microbatches: int

    @property
    def label(self) -> str:
        """The text that stands in the gap of a fold."""
        return f"… ×{self.num_microbatches:,} …"


@dataclass(frozen=True)
class Timeline:
    """Spans as they are drawn, the folds among them, and the time that is drawn in all."""

    spans: Spans
    folds: tuple[Fold, ...]
    length: float

    def at(self, time: float) -> float:
        """The place where a time is drawn; all times in a fold share its gap."""
        shift = 0.0
        for fold in self.folds:
            if time <= fold.begin:
                break
            if time < fold.end:
                share = (time - fold.begin) / (fold.end - fold.begin)
                return fold.begin + share * fold.gap - shift
            shift += fold.end - fold.begin - fold.gap
        return time - shift

    def ticks(self, step: float) -> Iterator[tuple[float, float]]:
        """Multiples of `step` that are not folded, each with the place where it is drawn."""
        gone = sum(fold.end - fold.begin - fold.gap for fold in self.folds)
        for number in range(ceil((self.length + gone) / step)):
            time = number * step
            if not any(fold.begin < time < fold.end for fold in self.folds):
                yield time, self.at(time)


def fold(spans: Spans, length: float, most: int = MOST) -> Timeline:
    """The timeline of computes that start at 0; a list longer than `most` computes is folded."""
    if sum(map(len, spans)) <= most:
        return Timeline(spans, (), length)
    cuts = _cuts(spans)
    gone = sum(end - begin for begin, end, _ in cuts)
    gap = _GAP * (length - gone)
    if all(span.end.is_integer() for rank in spans for span in rank):
        gap = _UNITS
    folds = tuple(Fold(begin, end, gap, count) for begin, end, count in cuts)
    whole = Timeline(spans, folds, length)
    drawn = tuple(tuple(_drawn(rank, whole)) for rank in spans)
    return Timeline(drawn, folds, whole.at(length))


def _cuts(spans: Spans) -> list[tuple[float, float, int]]:
    """Begin, end and microbatches of what is left out: in the forwards, in the backwards, or both.

    Schedules run in rounds of as many microbatches as ranks; two are drawn at either end.
    """
    starts: dict[Op, dict[int, float]] = {}
    for rank in spans:
        for action, start, _ in rank:
            if action.stage == 0:
                op = Op.F if action.op == Op.F else Op.B
                known = starts.setdefault(op, {}).get(action.microbatch, start)
                starts[op][action.microbatch] = min(known, start)
    cuts: list[tuple[float, float, int]] = []
    kept = 2 * len(spans)
    for of in starts.values():
        count = (len(of) - 2 * kept) // len(spans) * len(spans)
        if count < 2 or kept not in of or kept + count not in of:
            continue
        begin, end = of[kept], of[kept + count]
        if end > begin and (not cuts or begin >= cuts[-1][1]):
            cuts.append((begin, end, count))
    return cuts


def _drawn(rank: Sequence[Span], whole: Timeline) -> Iterator[Span]:
    """The spans of a rank where they are drawn, without what is folded; one at a cut is clipped."""
    for action, start, end in rank:
        for cut in whole.folds:
            if start < cut.begin < end:
                yield Span(action, whole.at(start), whole.at(cut.begin))
            if start < cut.end < end:
                yield Span(action, whole.at(cut.end), whole.at(end))
        if not any(start < c.end and end > c.begin for c in whole.folds):
            yield Span(action, whole.at(start), whole.at(end))


def tick_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is `least` or more."""
    steps = (digit * 10.0**exponent for exponent in range(-9, 12) for digit in (1, 2, 5))
    return next(step for step in steps if step >= least)
