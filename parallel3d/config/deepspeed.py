"""The part of the config that DeepSpeed defines: its keys, its meaning, its defaults.

A test compares the defaults with the installed DeepSpeed. What parallel3d does not support stands
in deepspeed_keys.py and is refused by name.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Strict

from parallel3d.base.section import PathText, Section, Size

# A block that a message gives to be pasted where it is missing.
EXAMPLE = {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}}
Beta = Annotated[float, Field(ge=0, lt=1)]


OTHER_OPTIMIZERS = ("adagrad", "lamb", "lion", "muadam", "muadamw", "musgd", "muon")
ONE_BIT_OPTIMIZERS = ("onebitadam", "zerooneadam", "onebitlamb")


def _optimizer_name(value: Any) -> Any:
    """DeepSpeed reads optimizer names in any case."""
    if not isinstance(value, str):
        return value
    if value.lower() in OTHER_OPTIMIZERS:
        raise ValueError('is not yet supported by parallel3d; use "AdamW"')
    if value.lower() in ONE_BIT_OPTIMIZERS:
        raise ValueError(
            'rounds what is exchanged to one bit, and was removed from DeepSpeed 0.19; use "AdamW"'
        )
    return {"adam": "Adam", "adamw": "AdamW", "fusedadam": "Adam"}.get(value.lower(), value)


def _whole_number(value: Any) -> Any:
    """Python finds true and 1.0 among the choices 0 to 3."""
    if type(value) is not int:
        raise ValueError("must be 0, 1, 2 or 3; write a whole number")
    return value


class AdamParams(Section):
    """What Adam is called with."""

    lr: float = Field(gt=0)
    """Peak learning rate; parallel3d.train.lr_schedule scales it."""
    betas: Annotated[tuple[Beta, Beta], Strict(False)] = (0.9, 0.999)
    """Decay of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of matrices. DeepSpeed's default is 0, torch's AdamW has 0.01."""
    torch_adam: bool = False
    """Torch's Adam rather than DeepSpeed's: as it is on the device anyway, so not with offload."""


class OptimizerConfig(Section):
    """The optimizer. As in DeepSpeed, both names mean AdamW: Adam with decoupled weight decay."""

    type: Annotated[Literal["AdamW", "Adam"], BeforeValidator(_optimizer_name)] = "AdamW"
    """"AdamW" or "Adam"; DeepSpeed's "Adam" decouples weight decay too. "FusedAdam" means "Adam",
    which is fused on devices and torch's on a CPU."""
    params: AdamParams = Field(examples=[EXAMPLE["params"]])
    """Learning rate, betas, eps and weight decay."""


class Bf16Config(Section):
    """Training in bfloat16 with fp32 master weights."""

    enabled: bool = False
    """Compute in bfloat16; gradients are accumulated in fp32."""


class Fp16Config(Section):
    """Training in fp16 with fp32 master weights and a loss scale."""

    enabled: bool = False
    """Compute in fp16. bf16 needs no loss scale; use it where the device has it."""
    loss_scale: float = Field(default=0.0, ge=0)
    """A fixed loss scale; 0 means dynamic scaling."""
    initial_scale_power: int = Field(default=16, ge=0, le=32)
    """Dynamic scaling starts at 2 to this power."""
    loss_scale_window: int = Field(default=1000, gt=0)
    """Steps without overflow after which the scale is doubled."""
    hysteresis: int = Field(default=2, gt=0)
    """Overflows that are borne before the scale is halved."""
    consecutive_hysteresis: bool = False
    """Whether a step without overflow restores the hysteresis."""
    min_loss_scale: float = Field(default=1.0, gt=0)
    """The scale is never halved below this."""


class OffloadOptimizerConfig(Section):
    """Where the optimizer's state lives and its step runs."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """"cpu" keeps moments and master weights in host memory and steps there; "nvme" on disk."""
    nvme_path: PathText | None = None
    """Folder on the NVMe drive, which exists on every node, for device "nvme"."""
    pin_memory: bool = True
    """Page-locked host memory, for copies that overlap with compute."""
    buffer_count: int = Field(default=4, ge=4)
    """Buffers for NVMe, each of the largest sub-group: a parameter, its gradient and Adam's two
    moments need 4, and 4 more for each of pipeline_read and pipeline_write."""
    fast_init: bool = False
    """Start the master weights on NVMe from parameters on NVMe, past the memory."""
    pipeline_read: bool = False
    """Read the next states from NVMe while a step runs."""
    pipeline_write: bool = False
    """Write the last states to NVMe while a step runs."""


class OffloadParamConfig(Section):
    """Where ZeRO-3's shards of the parameters live between uses."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """"cpu" keeps this rank's shards in host memory; "nvme" on disk."""
    nvme_path: PathText | None = None
    """Folder on the NVMe drive, which exists on every node, for device "nvme"."""
    pin_memory: bool = True
    """Page-locked host memory, for copies that overlap with compute."""
    buffer_count: int = Field(default=5, ge=0)
    """Buffers for NVMe."""
    buffer_size: Size = Field(default=100_000_000, ge=0)
    """Elements of one buffer for NVMe; the largest parameter's shard must fit."""
    max_in_cpu: Size = Field(default=1_000_000_000, ge=0)
    """Elements of this rank's shards that stay in host memory all the same when device is "nvme";
    only what is more goes to disk."""


class AioConfig(Section):
    """Asynchronous input and output, for NVMe offload."""

    block_size: Size = Field(default=2**20, gt=0)
    """Bytes of one request."""
    queue_depth: int = Field(default=8, gt=0)
    """Requests under way at once."""
    intra_op_parallelism: int = Field(default=1, gt=0)
    """Threads that share one read or write."""
    single_submit: bool = False
    """Submit requests one by one rather than in batches."""
    overlap_events: bool = True
    """Submit the next requests while earlier ones are awaited."""


def offload_in_words(optimizer: str, param: str) -> str:
    """What is offloaded to which device, in words; "none" where nothing is."""
    places = {"optimizer": optimizer, "parameters": param}
    return ", ".join(f"{k} on {v}" for k, v in places.items() if v != "none") or "none"


class ZeroConfig(Section):
    """How ZeRO shards the training state over the data-parallel ranks of a stage."""

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_whole_number)]
    """0 shards nothing (plain data parallelism), 1 the optimizer's state, 2 gradients too, 3
    parameters too."""
    offload_optimizer: OffloadOptimizerConfig = OffloadOptimizerConfig()
    """Optimizer state in host memory or on NVMe."""
    offload_param: OffloadParamConfig = OffloadParamConfig()
    """Parameters in host memory or on NVMe (stage 3)."""
    contiguous_gradients: bool = True
    """Copy gradients to one buffer as they are produced; not at stage 3 reducing once a step."""
    overlap_comm: bool | None = None
    """Overlap gradient reduction with backward; null means: at stage 3. Reduced once a step: with a
    stage's last backward, each time that reduce_bucket_size elements are complete."""
    reduce_bucket_size: Size = Field(default=500_000_000, gt=0)
    """Elements reduced at a time."""
    allgather_bucket_size: Size = Field(default=500_000_000, ge=0)
    """Elements gathered at a time after a step (stage 1)."""
    sub_group_size: Size = Field(default=1_000_000_000, ge=0)
    """Elements that one optimizer sub-step covers (stage 3)."""
    stage3_prefetch_bucket_size: Size = Field(default=50_000_000, ge=0)
    """Elements fetched ahead of use (stage 3)."""
    stage3_param_persistence_threshold: Size = Field(default=100_000, ge=0)
    """Parameters with fewer elements are never sharded (stage 3)."""
    stage3_max_live_parameters: Size = Field(default=1_000_000_000, ge=0)
    """Gathered elements above which parameters are released (stage 3)."""
    stage3_max_reuse_distance: Size = Field(default=1_000_000_000, ge=0)
    """Keep a parameter that is used again within so many elements (stage 3)."""
    stage3_model_persistence_threshold: Size = Field(default=2**63 - 1, ge=0)
    """Elements that may stay unsharded in all, whatever the threshold for one (stage 3)."""
    stage3_module_granularity_threshold: Size = Field(default=0, ge=0)
    """Modules with fewer elements for each of their submodules are gathered whole (stage 3)."""
    stage3_use_all_reduce_for_fetch_params: bool = False
    """Gather parameters by an all-reduce of zeros and shards (stage 3)."""
    stage3_allgather_sequential: bool = False
    """Gather parameter by parameter, without a buffer for all (stage 3)."""
    reduce_scatter: bool = True
    """Reduce a gradient to the rank that keeps it, rather than to all (stage 2)."""
    use_multi_rank_bucket_allreduce: bool = True
    """Reduce the buckets of several ranks in one all-reduce (stage 2)."""
    allgather_partitions: bool = True
    """After a step, gather the new weights; false broadcasts them from rank to rank (stage 2)."""
    parameter_alignment: bool = False
    """Let every parameter start at a multiple of 16 bytes in ZeRO's flat buffer (stages 1, 2)."""
    ignore_unused_parameters: bool = True
    """No effect: every parameter has its gradient here."""
    override_module_apply: bool = True
    """Gather parameters in Module.apply while modules are built (stage 3)."""
    log_trace_cache_warnings: bool = False
    """Warn where the order of modules differs from the recorded one (stage 3)."""
    enable_sanity_checks: bool = False
    """DeepSpeed's own checks (stage 3)."""
