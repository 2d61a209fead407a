"""DeepSpeed's `scheduler` block: its five schedules, with its names and defaults.

config/learning_rate.py computes what they give, as pure functions of the step.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from parallel3d.base.section import ABSENT, Problem, Problems, Section

Steps = Annotated[int, Field(gt=0)]
Rate = Annotated[float, Field(ge=0)]
Ratio = Annotated[float, Field(ge=0, le=1)]
# Every field that is named so means the length of the run, which is not known at first.
TOTAL_STEPS = "total_num_steps"


class WarmupLRParams(Section):
    """A rise from warmup_min_lr to warmup_max_lr, then no change."""

    warmup_min_lr: Rate = 0.0
    """Learning rate at the first step."""
    warmup_max_lr: Rate | None = None
    """Learning rate after the warm-up; null means optimizer.params.lr."""
    warmup_num_steps: Steps = 1000
    """Steps of the warm-up; DeepSpeed makes 1 to 2."""
    warmup_type: Literal["log", "linear"] = "log"
    """The rise: with the logarithm of the step, or with the step."""


class WarmupDecayLRParams(WarmupLRParams):
    """A rise from warmup_min_lr to warmup_max_lr, then a line to 0 at total_num_steps."""

    warmup_max_lr: Rate | None = 0.001
    """Learning rate after the warm-up; null means optimizer.params.lr."""
    total_num_steps: Steps | Literal["auto"]
    """Where the line reaches 0; "auto" means the steps of the run."""


class WarmupCosineLRParams(Section):
    """Ratios of optimizer.params.lr: a rise to 1, then half a cosine."""

    total_num_steps: Steps | Literal["auto"]
    """Where the cosine ends; "auto" means the steps of the run."""
    warmup_min_ratio: Ratio = 0.0
    """Ratio at which the rise starts."""
    warmup_num_steps: Steps = 1000
    """Steps of the warm-up; DeepSpeed makes 1 to 2."""
    cos_min_ratio: Ratio = 0.0001
    """Ratio at which the cosine ends."""
    warmup_type: Literal["log", "linear"] = "log"
    """The rise: with the logarithm of the step, or with the step."""


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


class WarmupLR(Section):
    """DeepSpeed's WarmupLR."""

    type: Literal["WarmupLR"]
    """The schedule's name."""
    params: WarmupLRParams = WarmupLRParams()
    """Its parameters."""


class WarmupDecayLR(Section):
    """DeepSpeed's WarmupDecayLR."""

    type: Literal["WarmupDecayLR"]
    """The schedule's name."""
    params: WarmupDecayLRParams
    """Its parameters."""


class WarmupCosineLR(Section):
    """DeepSpeed's WarmupCosineLR."""

    type: Literal["WarmupCosineLR"]
    """The schedule's name."""
    params: WarmupCosineLRParams
    """Its parameters."""


class OneCycle(Section):
    """DeepSpeed's OneCycle."""

    type: Literal["OneCycle"]
    """The schedule's name."""
    params: OneCycleParams
    """Its parameters."""


class LRRangeTest(Section):
    """DeepSpeed's LRRangeTest."""

    type: Literal["LRRangeTest"]
    """The schedule's name."""
    params: LRRangeTestParams = LRRangeTestParams()
    """Its parameters."""


Scheduler = WarmupLR | WarmupDecayLR | WarmupCosineLR | OneCycle | LRRangeTest
SCHEDULERS: dict[str, type[Section]] = {
    cls.__name__: cls for cls in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


def scheduler_section(value: Any) -> Any:
    """The `scheduler` section, by the class that its type names; null is none."""
    if value is None or isinstance(value, Section):
        return value
    if not isinstance(value, dict):
        raise ValueError("must be a block of settings; write {...}")
    name = value.get("type", ABSENT)
    if not isinstance(name, str) or name not in SCHEDULERS:
        known = ", ".join(SCHEDULERS)
        raise Problems([Problem("type", name, "names no scheduler", f"use one of: {known}")])
    return SCHEDULERS[name].model_validate(value)
