"""DeepSpeed's `scheduler` block: schedules with a warm-up, with its names and defaults.

OneCycle and LRRangeTest, which search for a rate, are refused.

`rate(lr, step)` returns the learning rate at `step`, counted from 0; `lr` is optimizer.params.lr.
Step n uses the formula's value at n - 1, because DeepSpeed's scheduler steps after the optimizer.
"""

from math import cos, log, pi
from typing import Annotated, Literal

from pydantic import Field

from parallel3d.base.section import Choice, PositiveCount, Section, Share

Rate = Annotated[float, Field(ge=0)]
# Fields of this name hold the length of the run, which is not known when the file is read.
TOTAL_STEPS = "total_num_steps"


class Warmup(Section):
    """The warm-up that three schedules share."""

    warmup_num_steps: PositiveCount = 1000
    """Steps of the warm-up; as in DeepSpeed, at least 2."""
    warmup_type: Literal["log", "linear"] = "log"
    """Warm up with the logarithm of the step, or linearly."""

    @property
    def num_steps(self) -> int:
        """Steps of the warm-up, at least 2 as in DeepSpeed."""
        return max(2, self.warmup_num_steps)

    def rise(self, step: int) -> float | None:
        """Return the fraction of the warm-up's rise at `step`; None after the warm-up."""
        if step == 0:
            return 0.0
        if step > self.num_steps:
            return None
        if self.warmup_type == "log":
            return log(step) / log(self.num_steps)
        return (step - 1) / self.num_steps


class WarmupLRParams(Warmup):
    """Warm-up from warmup_min_lr to warmup_max_lr, then constant."""

    warmup_min_lr: Rate = 0.0
    """Learning rate at the first step."""
    warmup_max_lr: Rate | None = None
    """Learning rate at the end of the warm-up; null means optimizer.params.lr."""

    def rate(self, lr: float, step: int) -> float:
        """Return the learning rate of DeepSpeed's WarmupLR or WarmupDecayLR at `step`."""
        low = self.warmup_min_lr
        high = self.warmup_max_lr
        share = self.rise(step)
        share = self._after(step) if share is None else share
        return low + ((lr if high is None else high) - low) * share

    def _after(self, step: int) -> float:
        """Return the fraction of the rise that remains at `step`, after the warm-up."""
        return 1.0


class WarmupDecayLRParams(WarmupLRParams):
    """Warm-up from warmup_min_lr to warmup_max_lr, then linear decay to 0 at total_num_steps."""

    warmup_max_lr: Rate | None = 0.001
    """Learning rate at the end of the warm-up; null means optimizer.params.lr."""
    total_num_steps: PositiveCount | Literal["auto"]
    """Step at which the decay ends; "auto" means the last step of the run."""

    def _after(self, step: int) -> float:
        total = int(self.total_num_steps)  # "auto" is resolved by now
        return max(0.0, (total - (step - 1)) / max(1, total - self.num_steps))


class WarmupCosineLRParams(Warmup):
    """Fractions of optimizer.params.lr: warm-up to 1, then half a cosine."""

    total_num_steps: PositiveCount | Literal["auto"]
    """Step at which the decay ends; "auto" means the last step of the run."""
    warmup_min_ratio: Share = 0.0
    """Fraction of optimizer.params.lr at which the warm-up starts."""
    cos_min_ratio: Share = 0.0001
    """Fraction of optimizer.params.lr at which the cosine ends."""

    def rate(self, lr: float, step: int) -> float:
        """Return the learning rate of DeepSpeed's WarmupCosineLR at `step`."""
        if step == 0:
            return 0.0  # DeepSpeed ignores warmup_min_ratio here
        share = self.rise(step)
        least = self.warmup_min_ratio
        if share is None:
            total = int(self.total_num_steps)  # "auto" is resolved by now
            done = min(1.0, (step - self.num_steps) / max(1, total - self.num_steps))
            share = (1 + cos(pi * done)) / 2
            least = self.cos_min_ratio
        return lr * (least + (1 - least) * share)


class WarmupLR(Section):
    """A warm-up, then a constant rate."""

    type: Literal["WarmupLR"]
    """Name of the schedule."""
    params: WarmupLRParams = WarmupLRParams()
    """Parameters of the schedule."""


class WarmupDecayLR(Section):
    """A warm-up, then a linear decay."""

    type: Literal["WarmupDecayLR"]
    """Name of the schedule."""
    params: WarmupDecayLRParams
    """Parameters of the schedule."""


class WarmupCosineLR(Section):
    """A warm-up, then half a cosine."""

    type: Literal["WarmupCosineLR"]
    """Name of the schedule."""
    params: WarmupCosineLRParams
    """Parameters of the schedule."""


SCHEDULERS = {cls.__name__: cls for cls in (WarmupLR, WarmupDecayLR, WarmupCosineLR)}
SCHEDULER = Choice("type", "scheduler", SCHEDULERS.keys, SCHEDULERS.__getitem__)
