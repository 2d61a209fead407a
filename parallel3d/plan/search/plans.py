"""Plans: the rows of the planner's table."""

from dataclasses import dataclass
from functools import cached_property

from parallel3d.model.spec import Shape
from parallel3d.plan.layers.placement import cost_of, layers_by_stage, model_of, recompute_of
from parallel3d.plan.memory.peak import Memory
from parallel3d.plan.request import Request
from parallel3d.plan.setting import Setting
from parallel3d.plan.time.step import StepTime


@dataclass(frozen=True)
class Plan:
    """One way to run what was requested: the memory of its fullest rank, and the time of a step.

    - `reason`: what does not fit and by how much, "" where all fits.
    - `remedy`: the smallest change that makes the plan fit.
    """

    request: Request
    setting: Setting
    memory: Memory
    time: StepTime
    reason: str = ""
    remedy: str = ""

    @property
    def fits(self) -> bool:
        """True if device and host have room for the plan."""
        return not self.reason

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all devices."""
        return self.setting.tokens_per_step / self.time.seconds

    @property
    def days(self) -> float | None:
        """Days of the run without evaluation and checkpoints; None if its length is unknown.

        With train.batch_schedule: at the tokens per second of the largest batch.
        """
        tokens = self.request.num_tokens
        return None if tokens is None else tokens / self.tokens_per_second / 86400

    @property
    def device_hours(self) -> float | None:
        """Device-hours of the run; None if its length is unknown."""
        return None if self.days is None else self.days * 24 * self.request.devices

    def per_device(self, flops: float) -> float:
        """Return the FLOP/s of one device, for steps of `flops` FLOPs on all devices."""
        return flops / self.time.seconds / self.request.devices

    def mfu(self, flops: float) -> float | None:
        """Return a device's FLOP/s over its peak, for steps of `flops`; None without a peak."""
        peak = self.request.hardware.peak(self.request.workload.precision)
        return None if peak is None else self.per_device(flops) / peak

    @cached_property
    def recomputed_flops(self) -> float:
        """FLOPs that recomputation adds to a step."""
        flops = 0
        work = self.setting.workload
        model = model_of(work.layers)
        shape = Shape(1, work.seq)
        for part in layers_by_stage(model, self.setting.num_stages, work.seq):
            ways = recompute_of(part, self.setting.flow.recompute)
            for kind, way in zip(part.kinds, ways, strict=True):
                flops += cost_of(model, kind, shape, recompute=way).recomputed.flops
        return flops * self.request.global_batch_size
