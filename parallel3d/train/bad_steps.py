"""Decides about steps whose loss or gradient norm is not finite, or spikes (no torch)."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from parallel3d.base.robust import robust_score
from parallel3d.config.parallel3d_block import TrainConfig

MOST_OVERFLOWS = 10  # steps beyond the hysteresis
WINDOW = 128  # trained steps with which a step is compared
KEY = "bad_steps"  # in state.json


class Verdict(NamedTuple):
    """The action on a step: "train" on it, "skip" its update, "rewind" or "stop"; and why.

    A spike that is trained on has a reason, too.
    """

    action: str
    reason: str = ""
    remedy: str = ""


_LOSS_REMEDY = "Lower optimizer.params.lr, lengthen the warm-up, or check the data of this step"
_NORM_REMEDY = "The losses are finite. Lower optimizer.params.lr"


class Overflows:
    """Counts the fp16 steps in a row whose gradients overflowed at one loss scale.

    A dynamic scale falls after fp16.hysteresis of them. One that does not fall makes a run of
    skipped steps, which ends as if it had trained.
    """

    def __init__(self, hysteresis: int, is_fixed: bool) -> None:
        """Create the counter; `is_fixed` if the config sets the scale."""
        self._most = hysteresis + MOST_OVERFLOWS
        self._is_fixed = is_fixed
        self._scale = 0.0
        self._count = 0

    def add(self, scale: float | None) -> Verdict:
        """Return what to do after a step that overflowed at a scale; None if it did not."""
        self._count = self._count + 1 if scale == self._scale else 1
        self._scale = scale or 0.0
        if scale is None or self._count < self._most:
            return Verdict("train")
        place = "fp16.min_loss_scale"
        remedy = f"Lower {place}, or use bf16"
        if self._is_fixed:
            place = "fp16.loss_scale"
            remedy = f"Lower {place}, or set it to 0, with which the scale is found"
        reason = (
            f"the gradients of the last {self._count} steps overflowed in fp16, and the scale "
            f"{scale:g} does not fall ({place})"
        )
        return Verdict("stop", reason, remedy)


class BadSteps:
    """Judges steps by `train.on_nonfinite` and `train.on_spike`, alike on every rank.

    A verdict depends only on the settings and on the losses and norms of all ranks since the
    window began. `state` has all of it, so a resumed run judges as the unbroken one did.
    """

    def __init__(
        self, train: TrainConfig, saved: Mapping[str, Any] | None = None, precision: str = "fp32"
    ) -> None:
        self._train = train
        self._norm_remedy = _NORM_REMEDY
        if precision != "fp32":
            self._norm_remedy = f"{_NORM_REMEDY}, or try fp32"
        self.count = int(saved.get(KEY, {}).get("count", 0)) if saved else 0
        """Number of steps that were skipped or rewound."""
        self.rewind_to(saved or {})

    @property
    def may_skip(self) -> bool:
        """True if a step must be judged before its update."""
        return "skip" in (self._train.on_nonfinite, self._train.on_spike)

    def judge(
        self, losses: Mapping[str, Sequence[float]], loss: float, norm: float | None
    ) -> Verdict:
        """Return what to do with a step, by the ranks' `losses` and the batch's mean `loss`.

        `losses`: the loss and each side loss on every rank, by name.
        `norm`: the gradient norm; None if fp16 gradients overflowed, which is not an error.
        """
        for name, of_ranks in losses.items():
            for rank, of_rank in enumerate(of_ranks):
                if not math.isfinite(of_rank):
                    reason = f"the {name} on rank {rank} is {of_rank}"
                    return self._limited(self._train.on_nonfinite, reason, _LOSS_REMEDY)
        if norm is not None and not 0 <= norm < math.inf:
            reason = "the gradient norm is not finite"
            return self._limited(self._train.on_nonfinite, reason, self._norm_remedy)
        for name, value, earlier in (
            ("loss", loss, self._losses),
            ("gradient norm", norm, self._norms),
        ):
            score = robust_score(value, earlier) if value is not None else 0.0
            if score > self._train.spike_score:
                reason = (
                    f"the {name} spikes to {value:.5g} (the last {len(earlier)} steps have a "
                    f"median of {median(earlier):.5g}; score {score:.1f})"
                )
                if self._train.on_spike == "ignore":
                    return Verdict("train", reason)
                return self._limited(self._train.on_spike, reason, _LOSS_REMEDY)
        return Verdict("train")

    def _limited(self, action: str, reason: str, remedy: str) -> Verdict:
        most = self._train.max_skips
        if action != "stop" and self.count >= most:
            reason += f", after {most} skipped batches (train.max_skips)"
            return Verdict("stop", reason, remedy)
        return Verdict(action, reason, remedy)

    def add(self, loss: float, norm: float | None) -> None:
        """Add a trained step to those with which later ones are compared."""
        self._losses.append(loss)
        if norm is not None:
            self._norms.append(norm)

    def rewind_to(self, state: Mapping[str, Any]) -> None:
        """Continue as from a checkpoint with this state.json; only the count stays."""
        saved = state.get(KEY, {})
        self.left_out = left_out(state)
        """Number of samples before the next one that rewinds left out."""
        self._losses: deque[float] = deque(saved.get("losses", ()), maxlen=WINDOW)
        self._norms: deque[float] = deque(saved.get("grad_norms", ()), maxlen=WINDOW)

    def state(self) -> dict[str, Any]:
        """Return the keys for state.json; none if no step was or can be skipped or rewound."""
        if not self.count and self._train.on_spike == "ignore":
            return {}
        windows = {"losses": [*self._losses], "grad_norms": [*self._norms]}
        return {KEY: {"count": self.count, "left_out": self.left_out, **windows}}


def left_out(state: Mapping[str, Any]) -> int:
    """Return the number of samples before a state.json's `next_sample` that rewinds left out."""
    return int(state.get(KEY, {}).get("left_out", 0))
