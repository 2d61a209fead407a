"""The settings that DeepSpeed defines, with its names, meaning and defaults.

A test compares the defaults with the installed DeepSpeed. Keys that parallel3d does not support
are in deepspeed_keys.py and are refused by name.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from parallel3d.base.errors import ConfigError
from parallel3d.base.section import (
    Choice,
    FolderText,
    Natural,
    Positive,
    PositiveCount,
    Problem,
    Section,
    Size,
)
from parallel3d.config.switch import Switched, missing_switch
from parallel3d.model import optimizers

# Shown in the message where the block is missing, so that it can be pasted.
EXAMPLE = {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}}
DEFAULT_LR = 1e-3  # DeepSpeed's Adam has it, for files without an optimizer

_LARGEST_SCALE = 2.0**32  # fp16 ends at 65,504: gradients of any loss would overflow beyond

# As `OptimizerConfig.type` spells them.
_ADAMW = {"adamw": "AdamW", "adam": "Adam", "fusedadam": "Adam"}


def _optimizer_name(value: object) -> object:
    """Return the name as `OptimizerConfig.type` spells it; DeepSpeed ignores its case."""
    if not isinstance(value, str):
        return value
    known = _ADAMW | {name.lower(): name for name in optimizers.names() if name != "adamw"}
    if name := known.get(value.lower()):
        optimizers.load(name)
        return name
    choice = " or ".join(f'"{name}"' for name in dict.fromkeys(known.values()))
    raise ValueError(f'must be {choice}; write "AdamW", or set run.optimizer_folders')


def _zero_stage(value: object) -> object:
    """Return the value if it is an integer: to Python, true and 1.0 equal a choice of 0 to 3."""
    if type(value) is not int:
        raise ValueError("must be 0, 1, 2 or 3; write 0, 1, 2 or 3")
    return value


def _params_of(type_name: str) -> type[Section]:
    """Return the settings of an optimizer; those of AdamW if its file cannot be used."""
    try:
        return optimizers.load(type_name).Params
    except ConfigError:  # a problem of optimizer.type
        return optimizers.load("adamw").Params


# The settings of optimizer.params, by optimizer.type.
PARAMS = Choice(
    "type",
    "optimizer",
    lambda: ("AdamW", "Adam", *(name for name in optimizers.names() if name != "adamw")),
    _params_of,
    beside="AdamW",
)


class OptimizerConfig(Section):
    """The optimizer. "Adam" means AdamW, too: in DeepSpeed it decouples weight decay."""

    type: Annotated[str, BeforeValidator(_optimizer_name)] = "AdamW"
    """"AdamW" or "Adam", which both decouple weight decay, as in DeepSpeed; "Muon" (docs/muon.md);
    or the name of a file in run.optimizer_folders. "FusedAdam" is read as "Adam", which is fused on
    GPUs and torch's on CPUs."""
    params: Annotated[Any, PlainValidator(PARAMS)] = Field(examples=[EXAMPLE["params"]])
    """Learning rate, and the optimizer's own settings."""


class Bf16Config(Switched):
    """Training in bfloat16 with fp32 master weights."""

    enabled: bool = False
    """Compute in bfloat16. Master weights are fp32, and gradients are accumulated in fp32."""


class Fp16Config(Switched):
    """Training in fp16 with fp32 master weights and a loss scale."""

    enabled: bool = False
    """Compute in fp16 with a loss scale. Prefer bf16 where the device supports it."""
    loss_scale: float = Field(default=0.0, ge=0, le=_LARGEST_SCALE)
    """Fixed loss scale; 0 selects dynamic scaling."""
    initial_scale_power: int = Field(default=16, ge=0, le=32)
    """Dynamic scaling starts at 2 to this power."""
    loss_scale_window: PositiveCount = 1000
    """Steps without overflow before the scale is doubled."""
    hysteresis: Positive = 2
    """Overflows tolerated before the scale is halved."""
    consecutive_hysteresis: bool = False
    """Reset the hysteresis after every step without overflow."""
    min_loss_scale: float = Field(default=1.0, gt=0, le=_LARGEST_SCALE)
    """Lower bound of the dynamic scale, at most 2 to the power of initial_scale_power."""

    def _problems(self) -> Iterable[Problem]:
        yield from super()._problems()
        first = 2.0**self.initial_scale_power
        if not self.loss_scale and self.min_loss_scale > first:
            yield Problem(
                "min_loss_scale",
                self.min_loss_scale,
                f"is above the first scale, 2^{self.initial_scale_power} = {first:g}",
                f"use {first:g} or less, or raise initial_scale_power",
            )


class OffloadConfig(Section):
    """A part of the training state that may live outside the device."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """Where it lives; required if the block has other keys."""
    nvme_path: FolderText | None = None
    """Folder on the NVMe drive of each node; required by device "nvme"."""
    pin_memory: bool = True
    """Use page-locked host memory, so that copies overlap with compute."""

    def _problems(self) -> Iterable[Problem]:
        return missing_switch("device", self.model_fields_set, '"cpu", "nvme" or "none"')


class OffloadOptimizerConfig(OffloadConfig):
    """Where the optimizer state lives and where the optimizer runs."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """"cpu" keeps moments and master weights in host memory and updates them there; "nvme" (stage
    3) keeps them on disk."""
    buffer_count: int = Field(default=4, ge=4)
    """Buffers for NVMe, each as large as the largest sub-group. A step needs 4 (parameter, gradient
    and two moments), plus 4 each for pipeline_read and pipeline_write."""
    pipeline_read: bool = False
    """Read the next states from NVMe while the current ones are updated."""
    pipeline_write: bool = False
    """Write the previous states to NVMe while the current ones are updated."""


class OffloadParamConfig(OffloadConfig):
    """Where ZeRO-3 keeps its parameter shards between uses."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """"cpu" keeps this rank's shards in host memory; "nvme" keeps them on disk."""
    buffer_count: Natural = 5
    """Number of buffers for NVMe."""
    buffer_size: Size = Field(default=100_000_000, ge=0)
    """Elements per NVMe buffer; must hold the largest parameter's shard."""
    max_in_cpu: Size = Field(default=1_000_000_000, ge=0)
    """With device "nvme", elements of this rank's shards that stay in host memory; only the excess
    goes to disk."""


class AioConfig(Section):
    """Asynchronous I/O for NVMe offload."""

    block_size: Size = Field(default=2**20, gt=0)
    """Bytes per request."""
    queue_depth: Positive = 8
    """Requests in flight at once."""
    intra_op_parallelism: Positive = 1
    """Threads that share one read or write."""
    single_submit: bool = False
    """Submit requests one by one instead of in batches."""
    overlap_events: bool = True
    """Submit new requests while earlier ones are in flight."""


def describe_offload(optimizer: str, param: str) -> str:
    """Return what is offloaded to which device, for people; "none" if nothing is.

    - `optimizer`: offload_optimizer.device.
    - `param`: offload_param.device.
    """
    places = {"optimizer": optimizer, "parameters": param}
    return ", ".join(f"{k} on {v}" for k, v in places.items() if v != "none") or "none"


class ZeroConfig(Section):
    """How ZeRO shards the training state over a stage's data-parallel ranks."""

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_zero_stage)]
    """Sharded over dp: 0 nothing (plain data parallelism), 1 the optimizer state, 2 also the
    gradients, 3 also the parameters."""
    offload_optimizer: OffloadOptimizerConfig = OffloadOptimizerConfig()
    """Optimizer state in host memory or on NVMe."""
    offload_param: OffloadParamConfig = OffloadParamConfig()
    """Parameters in host memory or on NVMe (stage 3)."""
    contiguous_gradients: bool = True
    """Copy gradients to one buffer as they are produced. No effect at stage 3 with one reduction
    per step."""
    overlap_comm: bool | None = None
    """Overlap gradient reduction with the backward; null enables it at stage 3 only. With one
    reduction per step, the overlap is with a stage's last backward, in buckets of
    reduce_bucket_size."""
    reduce_bucket_size: Size = Field(default=500_000_000, gt=0)
    """Elements per reduction."""
    allgather_bucket_size: Size = Field(default=500_000_000, ge=0)
    """Elements per all-gather after a step (stage 1)."""
    sub_group_size: Size = Field(default=1_000_000_000, gt=0)
    """Elements that the optimizer updates at a time (stage 3); in a file, 0 means no limit."""
    stage3_prefetch_bucket_size: Size = Field(default=50_000_000, ge=0)
    """Elements fetched ahead of use (stage 3)."""
    stage3_param_persistence_threshold: Size = Field(default=100_000, ge=0)
    """Parameters with fewer elements are not sharded (stage 3)."""
    stage3_max_live_parameters: Size = Field(default=1_000_000_000, ge=0)
    """Release parameters when more elements than this are gathered (stage 3)."""
    stage3_max_reuse_distance: Size = Field(default=1_000_000_000, ge=0)
    """Keep a gathered parameter if it is used again within this many elements (stage 3)."""
    use_multi_rank_bucket_allreduce: bool = True
    """Reduce the buckets of several ranks in one all-reduce (stage 2)."""
