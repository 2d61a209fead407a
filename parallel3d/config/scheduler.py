"""DeepSpeed's `scheduler` block: its five schedules, with its names and defaults.

`rate(lr, step)` is the learning rate at `step`, counted from 0; `lr` is optimizer.params.lr. Step n
has what the formula gives for n - 1, as DeepSpeed's scheduler steps after the optimizer.
"""

from math import cos, floor, log, pi
from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from parallel3d.base.section import Choice, Section

Steps = Annotated[int, Field(gt=0)]
Rate = Annotated[float, Field(ge=0)]
Ratio = Annotated[float, Field(ge=0, le=1)]
# Every field that is named so means the length of the run, which is not known at first.
TOTAL_STEPS = "total_num_steps"


class Warmup(Section):
    """A rise, and what follows it."""

    warmup_num_steps: Steps = 1000
    """Steps of the warm-up; DeepSpeed makes 1 to 2."""
    warmup_type: Literal["log", "linear"] = "log"
    """The rise: with the logarithm of the step, or with the step."""

    @property
    def num_steps(self) -> int:
        """Steps of the warm-up, as DeepSpeed has them."""
        return max(2, self.warmup_num_steps)

    def rise(self, step: int) -> float | None:
        """The share of the rise at `step`; None after the warm-up."""
        if step == 0:
            return 0.0
        if step > self.num_steps:
            return None
        if self.warmup_type == "log":
            return log(step) / log(self.num_steps)
        return (step - 1) / self.num_steps


class WarmupLRParams(Warmup):
    """A rise from warmup_min_lr to warmup_max_lr, then no change."""

    warmup_min_lr: Rate = 0.0
    """Learning rate at the first step."""
    warmup_max_lr: Rate | None = None
    """Learning rate after the warm-up; null means optimizer.params.lr."""

    def rate(self, lr: float, step: int) -> float:
        """The learning rate that DeepSpeed's WarmupLR or WarmupDecayLR sets at `step`."""
        low, high = self.warmup_min_lr, self.warmup_max_lr
        share = self.rise(step)
        share = self._after(step) if share is None else share
        return low + ((lr if high is None else high) - low) * share

    def _after(self, step: int) -> float:
        """The share of the rise that is left after the warm-up."""
        return 1.0


class WarmupDecayLRParams(WarmupLRParams):
    """A rise from warmup_min_lr to warmup_max_lr, then a line to 0 at total_num_steps."""

    warmup_max_lr: Rate | None = 0.001
    """Learning rate after the warm-up; null means optimizer.params.lr."""
    total_num_steps: Steps | Literal["auto"]
    """Where the line reaches 0; "auto" means the steps of the run."""

    def _after(self, step: int) -> float:
        total = _known(self.total_num_steps)
        return max(0.0, (total - (step - 1)) / max(1, total - self.num_steps))


class WarmupCosineLRParams(Warmup):
    """Ratios of optimizer.params.lr: a rise to 1, then half a cosine."""

    total_num_steps: Steps | Literal["auto"]
    """Where the cosine ends; "auto" means the steps of the run."""
    warmup_min_ratio: Ratio = 0.0
    """Ratio at which the rise starts."""
    cos_min_ratio: Ratio = 0.0001
    """Ratio at which the cosine ends."""

    def rate(self, lr: float, step: int) -> float:
        """The learning rate that DeepSpeed's WarmupCosineLR sets at `step`."""
        if step == 0:
            return 0.0  # whatever warmup_min_ratio says
        share, least = self.rise(step), self.warmup_min_ratio
        if share is None:
            total = _known(self.total_num_steps)
            done = min(1.0, (step - self.num_steps) / max(1, total - self.num_steps))
            share, least = (1 + cos(pi * done)) / 2, self.cos_min_ratio
        return lr * (least + (1 - least) * share)


class OneCycleParams(Section):
    """One cycle up and down (arXiv:1803.09820), then decay."""

    cycle_min_lr: Rate
    """Learning rate at the cycle's ends."""
    cycle_max_lr: Rate
    """Learning rate at its top."""
    decay_lr_rate: Rate = 0.0
    """After the cycle, cycle_min_lr / (1 + decay_lr_rate x intervals of decay_step_size)."""
    cycle_first_step_size: Steps = 2000
    """Steps up."""
    cycle_second_step_size: Annotated[int, Field(ge=0)] | None = None
    """Steps down; null means as many as up."""
    cycle_first_stair_count: int = Field(default=0, ge=0)
    """Stairs on the way up; 0 means none."""
    cycle_second_stair_count: Annotated[int, Field(ge=0)] | None = None
    """Stairs on the way down; null means as many as up."""
    decay_step_size: int = Field(default=0, ge=0)
    """Steps of an interval of the decay; 0 means no decay."""
    cycle_momentum: Literal[False]
    """Must be written, as false: DeepSpeed's default, true, cycles the betas too, which
    parallel3d keeps constant."""

    def rate(self, lr: float, step: int) -> float:
        """The learning rate that DeepSpeed's OneCycle sets at `step`."""
        up, down = self.cycle_first_step_size, self.cycle_second_step_size
        down = up if down is None else down
        low, high = self.cycle_min_lr, self.cycle_max_lr
        if step > up + down:
            if not self.decay_step_size:
                return low
            intervals = (step - up - down) / self.decay_step_size
            return low / (1 + self.decay_lr_rate * intervals)
        place, length, stairs = step % (up + down), up, self.cycle_first_stair_count
        if place > up:
            place, length = up + down - place, down
            if self.cycle_second_stair_count is not None:
                stairs = self.cycle_second_stair_count
        height = floor(place * stairs / length) / stairs if stairs else place / length
        return low + (high - low) * height


class LRRangeTestParams(Section):
    """A learning rate that grows without end, to find where training breaks (arXiv:1803.09820)."""

    lr_range_test_min_lr: Rate = 1e-3
    """Learning rate at the first step."""
    lr_range_test_step_size: Steps = 2000
    """Steps in which it grows by lr_range_test_step_rate times the first."""
    lr_range_test_step_rate: Rate = 1.0
    """How fast it grows."""
    lr_range_test_staircase: bool = False
    """Grow in stairs, once every lr_range_test_step_size steps."""

    def rate(self, lr: float, step: int) -> float:
        """The learning rate that DeepSpeed's LRRangeTest sets at `step`."""
        intervals = step / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            intervals = floor(intervals)
        return self.lr_range_test_min_lr * (1 + self.lr_range_test_step_rate * intervals)


def _schedule(name: str, params: type[Section], default: Any = ...) -> type[Section]:
    """The section of DeepSpeed's schedule of this name."""
    named: Any = Literal[name]
    return create_model(
        name,
        __base__=Section,
        __module__=__name__,
        type=(named, Field(description="The schedule's name.")),
        params=(params, Field(default, description="Its parameters.")),
    )


WarmupLR = _schedule("WarmupLR", WarmupLRParams, WarmupLRParams())
WarmupDecayLR = _schedule("WarmupDecayLR", WarmupDecayLRParams)
WarmupCosineLR = _schedule("WarmupCosineLR", WarmupCosineLRParams)
OneCycle = _schedule("OneCycle", OneCycleParams)
LRRangeTest = _schedule("LRRangeTest", LRRangeTestParams, LRRangeTestParams())
SCHEDULERS = {
    cls.__name__: cls for cls in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}
SCHEDULER = Choice("type", "scheduler", lambda: list(SCHEDULERS), SCHEDULERS.__getitem__)


def _known(steps: int | str) -> int:
    assert isinstance(steps, int), 'total_num_steps is "auto": resolve and with_corpus come first'
    return steps
