"""Requests to the planner, and plans: the rows of its table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import gcd
from typing import Any, NamedTuple

from parallel3d.base.mesh_sizes import AXES
from parallel3d.base.reader import JsonObject
from parallel3d.base.section import Problem
from parallel3d.config import RunConfig, arithmetic
from parallel3d.config.hardware import Hardware
from parallel3d.model.spec import LayerSpec, Shape
from parallel3d.model.spec import flops_of as products_flops
from parallel3d.plan.impossible import refuse_impossible
from parallel3d.plan.layers.placement import cost_of, layers_by_stage, model_of, recompute_of
from parallel3d.plan.memory.peak import Memory
from parallel3d.plan.setting import Setting, Workload
from parallel3d.plan.time.step import StepTime
from parallel3d.plan.vocabulary import with_vocabulary
from parallel3d.schedule import schedules

CHOICES = (
    *AXES,
    "ep",
    "dp_shards",
    "sequence_parallel",
    "micro_batch",
    "schedule",
    "stages_per_rank",
    "recompute",
    "zero_stage",
    "gradient_reduction",
    "weights",
    "offload_optimizer",
    "offload_param",
)


@dataclass(frozen=True, eq=False)
class Request:
    """A model and a global batch to plan on a number of devices.

    - `config`: the run, with a known vocabulary size.
    - `workload`: what all its plans share.
    - `fixed`: fixed choices, by the names of CHOICES.
    - `num_tokens`: tokens of the run; None if its length is not set in tokens or steps.
    - `batch_sizes`: with train.batch_schedule, its sizes; the global batch is the largest, which
      needs the most memory.
    """

    config: RunConfig
    workload: Workload
    hardware: Hardware
    devices: int
    global_batch_size: int
    fixed: Mapping[str, Any] = field(default_factory=dict)
    num_tokens: int | None = None
    batch_sizes: tuple[int, ...] = ()

    @property
    def common_batch(self) -> int:
        """The largest number of samples that divides the batch of every step."""
        return gcd(self.global_batch_size, *self.batch_sizes)

    @cached_property
    def schedules(self) -> tuple[str, ...]:
        """The names of all schedules, which are looked for on the disk."""
        return schedules.names()

    @cached_property
    def flops(self) -> "Flops":
        """FLOPs of a step."""
        each = flops_of(self.workload.layers, self.workload.seq)
        return Flops(*(self.global_batch_size * flops for flops in each))


class Flops(NamedTuple):
    """FLOPs of a forward and a backward, with all of the attention or without what its mask hides.

    `causal` leaves out half of the attention; with a window, less.
    """

    full: float
    causal: float


@lru_cache(maxsize=64)
def flops_of(layers: tuple[LayerSpec, ...], seq: int) -> Flops:
    """Return the FLOPs of one sample, the same sums as in metrics.jsonl."""
    full = masked = 0.0
    for layer in layers:
        cost = layer.cost(Shape(1, seq))
        full += cost.train_flops
        if inner := cost.forward.attention:
            masked += 3 * inner.flops * inner.keys / (2 * seq)
    return Flops(full, full - masked)


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
    def offload(self) -> str:
        """The plan's offloads in words."""
        return self.setting.state.offload

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
                again = cost_of(model, kind, shape, recompute=way).recomputed
                flops += products_flops(again.matmuls)
                flops += again.attention.flops if again.attention else 0
        return flops * self.request.global_batch_size

    def to_json(self) -> JsonObject:
        """Return the plan's row in `parallel3d plan --json`. Its keys must not change."""
        flops = self.request.flops
        again = flops.full + self.recomputed_flops
        return {
            **choices_json(self.setting, self.memory),
            "fits": self.fits,
            "reason": self.reason,
            "remedy": self.remedy,
            "step_seconds": self.time.seconds,
            "time": dict(self.time.parts),
            "bubble": self.time.bubble,
            "tokens_per_second": self.tokens_per_second,
            "model_tflops_per_device": self.per_device(flops.full) / 1e12,
            "hardware_tflops_per_device": self.per_device(again) / 1e12,
            "mfu_full": self.mfu(flops.full),
            "mfu_causal": self.mfu(flops.causal),
            "days": self.days,
            "device_hours": self.device_hours,
        }


def choices_json(setting: Setting, memory: Memory) -> JsonObject:
    """Return a setting's choices and the memory of its fullest rank as JSON."""
    flow = setting.flow
    state = setting.state
    return {
        **flow.mesh._asdict(),
        "ep": flow.ep,
        "dp_shards": flow.mesh.dp // state.copies if state.copies > 1 else None,
        "sequence_parallel": flow.sequence_parallel,
        "zero_stage": state.zero_stage,
        "gradient_reduction": "per_step" if state.reduces_once else "per_microbatch",
        "weights": state.weights if state.zero_stage == 3 else None,
        "offload": state.offload,
        "micro_batch": flow.micro_batch,
        "num_microbatches": setting.num_microbatches,
        "schedule": setting.order.schedule,
        "stages_per_rank": setting.order.stages_per_rank,
        "recompute": str(flow.recompute),
        "memory_bytes": {**memory.parts, "total": memory.total},
        "host_bytes": memory.host,
        "nvme_bytes": memory.nvme,
    }


def request_of(
    config: RunConfig, hardware: Hardware, devices: int, fixed: Mapping[str, object] | None = None
) -> Request:
    """Return the request of a config on `devices` devices.

    Without train_batch_size the global batch follows from micro batch, accumulation and mesh.
    Raises ConfigError if the batch or the vocabulary is unknown, for sizes that no devices can
    hold, and for bf16 on hardware without it.
    """
    peaks = hardware.peak_flops
    if config.bf16.enabled and "fp16" in peaks and "bf16" not in peaks:
        raise Problem(
            "bf16.enabled",
            True,
            f"{hardware.name} supports fp16, but not bf16",
            "use --bf16.enabled false --fp16.enabled true",
        ).error()
    config = with_vocabulary(config, may_guess=True)
    refuse_impossible(config, devices)
    if config.is_planned:
        assert config.train_batch_size, "the config's checks require it"
        batch = config.train_batch_size
    else:
        own = devices if config.mesh.dp == "auto" else config.mesh.sizes.ranks
        batch = config.resolve(own).global_batch_size
    train = config.train
    seq = config.data.sequence_length
    num_tokens = train.max_tokens
    if train.steps is not None:
        num_tokens = train.steps * batch * seq
    sizes = tuple(size for _, size in train.batch_schedule)
    if sizes:
        batch = max(sizes)
        if train.steps is not None:
            phases = arithmetic.batch_phases(train, config.data)
            num_tokens = arithmetic.samples_of_steps(phases, train.steps) * seq
    return Request(
        config,
        Workload.of(config),
        hardware,
        devices,
        global_batch_size=batch,
        fixed=fixed or {},
        num_tokens=num_tokens,
        batch_sizes=sizes,
    )
