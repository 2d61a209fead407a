"""Which layer of a run left its own range first (no torch).

A record is the content of layers/step-N.json in a run's folder, written by `train/layer_history`:
the names of the `layers`, the `steps` before and around step N, the first sample of each, and for
each quantity a row of layers for each step. A number that is not finite is null.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from parallel3d.base.robust import robust_score

FOLDER = "layers"
SCORE = 8.0
"""Robust standard deviations above the earlier values that are out of range."""
RECENT = 16
"""Most steps before an event in which a layer is said to have left its range."""


class Quantity(NamedTuple):
    """A number of each layer: its title, and how far above the median it is out of range."""

    title: str
    factor: float


QUANTITIES = {
    "largest_output": Quantity("largest output", 4.0),
    "gradient_norm": Quantity("gradient norm", 2.0),
    "update_over_weight": Quantity("norm of the update over that of the weights", 2.0),
}
Record = Mapping[str, Any]


class Cause(NamedTuple):
    """The layer that left its own range first; None for all at once, which is the batch."""

    quantity: str
    layer: int | None
    place: int
    """The index, in the record, of the step in which it left."""


def cause_of(record: Record) -> Cause | None:
    """Return the layer that was first out of its own range at the event; None if none was.

    A layer's output is wrong in the event's step; an update was wrong in the step before it.
    Gradients that jump in most layers at once come from the batch.
    """
    event = record["steps"].index(record["step"])
    num_layers = len(record["layers"])
    for name, end in (
        ("largest_output", event),
        ("update_over_weight", event - 1),
        ("gradient_norm", event),
        ("update_over_weight", event),
    ):
        series = [*zip(*record[name][: end + 1], strict=True)]
        factor = QUANTITIES[name].factor
        num_jumps = sum(_jumps(values, factor) for values in series)
        if name == "gradient_norm" and 2 * num_jumps > num_layers:
            return Cause(name, None, end)
        runs = [_run_length(values, factor) for values in series]
        longest = max(runs, default=0)
        if not longest:
            continue
        # An output passes on to later layers, and a gradient to earlier ones.
        layers = [layer for layer, run in enumerate(runs) if run == longest]
        layer = layers[-1] if name == "gradient_norm" else layers[0]
        return Cause(name, layer, end + 1 - longest)
    return None


def _jumps(values: Sequence[float | None], factor: float) -> bool:
    """Return True if the last value is large beside those before it, and the one before is not."""
    if len(values) < 3:
        return False
    before = values[-2]
    last = values[-1]
    known = _known(values[:-2])
    if not known or before is None or last is None:
        return False
    return before <= factor * median(known) < last


def _run_length(values: Sequence[float | None], factor: float) -> int:
    """Return the number of last steps, in a row, that are out of range."""
    length = 0
    while length < min(RECENT, len(values)) and _is_out(values[: len(values) - length], factor):
        length += 1
    return length


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _is_out(values: Sequence[float | None], factor: float) -> bool:
    """Return True if the last value is out of the range of those before it."""
    *earlier, last = values
    if last is None:
        return True
    known = _known(earlier)
    return robust_score(last, known) > SCORE and last > factor * median(known)


def in_words(record: Record) -> str:
    """Return a sentence about the layer that left its own range first, or about the batch."""
    cause = cause_of(record)
    if cause is None:
        return "no layer left its own range"
    place = cause.place
    step = record["steps"][place]
    if cause.layer is None:
        return (
            f"the gradients of most layers jump at once at step {step}, and no output or earlier "
            "update left its range: a bad batch (samples from "
            f"{record['first_samples'][place]:,} on), or a rate that is too high for all"
        )
    values = [row[cause.layer] for row in record[cause.quantity]]
    known = _known(values[:place])
    shown = "not finite" if values[place] is None else f"{values[place]:.3g}"
    usual = f", and the median before was {median(known):.3g}" if known else ""
    return (
        f"{record['layers'][cause.layer]} left its own range first, at step {step}: its "
        f"{QUANTITIES[cause.quantity].title} is {shown}{usual}"
    )
