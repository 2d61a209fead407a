"""The bubble: one meaning for plans, simulations, measured steps, text and pictures."""

from parallel3d.schedule.action import Spans


def bubble(spans: Spans) -> float:
    """The idle fraction of the ranks' time, from the first compute to the end of the last.

    1 - busy / (ranks x makespan), counting forwards and backwards only: what is once a step
    (reductions, the optimizer) is no part of it. arXiv:2104.04473, section 2.2, takes it over the
    busy time instead: b / (1 - b).
    """
    computes = [span for rank in spans for span in rank if span.action.is_compute]
    busy = sum(span.end - span.start for span in computes)
    makespan = max(span.end for span in computes) - min(span.start for span in computes)
    return idle_fraction(busy, len(spans), makespan)


def idle_fraction(busy: float, ranks: int, makespan: float) -> float:
    """The bubble of ranks that compute for `busy` seconds in all while `makespan` seconds pass."""
    return max(0.0, 1 - busy / (ranks * makespan)) if makespan > 0 else 0.0
