"""Requests to the planner: what to plan, and what is fixed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import gcd
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field

from parallel3d.base import explain
from parallel3d.base.section import Positive, Problem, Section
from parallel3d.config import RunConfig, arithmetic
from parallel3d.config.hardware import Hardware
from parallel3d.config.parallel3d_block import Recomputation
from parallel3d.model.recompute import NONE
from parallel3d.model.spec import LayerSpec, Shape
from parallel3d.plan.impossible import refuse_impossible
from parallel3d.plan.setting import Device, Workload
from parallel3d.plan.vocabulary import with_vocabulary
from parallel3d.schedule import schedules


class FixedChoices(Section):
    """The choices of the planner that a request may fix, for their names and types."""

    pp: Positive = 1
    dp: Positive = 1
    cp: Positive = 1
    tp: Positive = 1
    ep: Positive = 1
    dp_shards: Positive = 1
    sequence_parallel: bool = False
    micro_batch: Positive = 1
    schedule: Annotated[str, AfterValidator(schedules.load)] = "gpipe"
    stages_per_rank: Positive = 1
    recompute: Recomputation = NONE
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    gradient_reduction: Literal["auto", "per_step", "per_microbatch"] = "auto"
    weights: Literal["auto", "per_step", "per_pass", "per_microbatch"] = "auto"
    offload_optimizer: Device = "none"
    offload_param: Device = "none"


CHOICES = tuple(FixedChoices.model_fields)


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


def request_of(
    config: RunConfig, hardware: Hardware, devices: int, fixed: Mapping[str, object] | None = None
) -> Request:
    """Return the request of a config on `devices` devices.

    Without train_batch_size the global batch follows from micro batch, accumulation and mesh.
    Raises ConfigError if a fixed choice is invalid or the batch or the vocabulary is unknown, for
    sizes that no devices can hold, and for bf16 on hardware without it.
    """
    explain.checked(FixedChoices, dict(fixed or {}), "--fix")
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
