"""Folds away the steady state of a long timeline, in which every rank repeats itself."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from parallel3d.schedule.action import Op, Span, Spans

MOST = 1_000  # computes drawn without folding
_GAP = 0.12  # of the drawn time, per fold
_UNITS = 4.0  # width of a gap where all times are integers


@dataclass(frozen=True)
class Fold:
    """A cut from `begin` to `end`, in seconds, drawn as a gap of `gap` seconds."""

    begin: float
    end: float
    gap: float
    num_microbatches: int

    @property
    def label(self) -> str:
        """The text in the gap of a fold."""
        return f"… ×{self.num_microbatches:,} …"


@dataclass(frozen=True)
class Timeline:
    """Spans as they are drawn, the folds among them, and the drawn length of time."""

    spans: Spans
    folds: tuple[Fold, ...]
    length: float

    def at(self, time: float) -> float:
        """Return the position at which a time is drawn; all times in a fold share its gap."""
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
        """Yield the multiples of `step` that are not folded, each with its position."""
        gone = sum(fold.end - fold.begin - fold.gap for fold in self.folds)
        for number in range(ceil((self.length + gone) / step)):
            time = number * step
            if not any(fold.begin < time < fold.end for fold in self.folds):
                yield time, self.at(time)


def fold(spans: Spans, length: float, most: int = MOST) -> Timeline:
    """Return the timeline of computes that start at 0; fold it if there are more than `most`."""
    if sum(map(len, spans)) <= most:
        return Timeline(spans, (), length)
    cuts = _cuts(spans)
    gap = _GAP * (length - sum(end - begin for begin, end, _ in cuts))
    if all(span.end.is_integer() for rank in spans for span in rank):
        gap = _UNITS
    folds = tuple(Fold(begin, end, gap, count) for begin, end, count in cuts)
    unfolded = Timeline(spans, folds, length)
    drawn = tuple(tuple(_drawn(rank, unfolded)) for rank in spans)
    return Timeline(drawn, folds, unfolded.at(length))


def _cuts(spans: Spans) -> list[tuple[float, float, int]]:
    """Return begin, end and microbatches of each cut: in the forwards, in the backwards, or both.

    Schedules run in rounds of as many microbatches as ranks; two rounds are drawn at either end.
    """
    starts: dict[Op, dict[int, float]] = {}
    for rank in spans:
        for action, start, _ in rank:
            if action.stage == 0:
                op = Op.F if action.op == Op.F else Op.B
                known = starts.setdefault(op, {}).get(action.microbatch, start)
                starts[op][action.microbatch] = min(known, start)
    cuts: list[tuple[float, float, int]] = []
    at_ends = 2 * len(spans)
    for start_of in starts.values():
        count = (len(start_of) - 2 * at_ends) // len(spans) * len(spans)
        if count < 2 or at_ends not in start_of or at_ends + count not in start_of:
            continue
        begin, end = start_of[at_ends], start_of[at_ends + count]
        if end > begin and (not cuts or begin >= cuts[-1][1]):
            cuts.append((begin, end, count))
    return cuts


def _drawn(rank: Sequence[Span], timeline: Timeline) -> Iterator[Span]:
    """Yield the spans of a rank at their positions, without folded ones, clipped at cuts."""
    for action, start, end in rank:
        for cut in timeline.folds:
            if start < cut.begin < end:
                yield Span(action, timeline.at(start), timeline.at(cut.begin))
            if start < cut.end < end:
                yield Span(action, timeline.at(cut.end), timeline.at(end))
        if not any(start < c.end and end > c.begin for c in timeline.folds):
            yield Span(action, timeline.at(start), timeline.at(end))


def tick_step(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is at least `least`."""
    steps = (digit * 10.0**exponent for exponent in range(-9, 12) for digit in (1, 2, 5))
    return next(step for step in steps if step >= least)
