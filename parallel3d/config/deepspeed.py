"""The part of the config that DeepSpeed defines: its keys, its meaning, its defaults.

A test compares the defaults with the installed DeepSpeed. What parallel3d does not support stands
in deepspeed_keys.py and is refused by name.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Strict

from parallel3d.config.section import Section, Size, refuse

Beta = Annotated[float, Field(ge=0, lt=1)]


OTHER_OPTIMIZERS = ("adagrad", "lamb", "lion", "muadam", "muadamw", "musgd", "muon")


def _optimizer_name(value: Any) -> Any:
    """DeepSpeed reads optimizer names in any case."""
    if not isinstance(value, str):
        return value
    if value.lower() in OTHER_OPTIMIZERS:
        raise ValueError('is not yet supported by parallel3d; use "AdamW"')
    return {"adam": "Adam", "adamw": "AdamW"}.get(value.lower(), value)


def _whole_number(value: Any) -> Any:
    """Python finds true and 1.0 among the choices 1 and 3."""
    if type(value) is not int:
        raise ValueError("must be 1 or 3; write 1 or 3")
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


class OptimizerConfig(Section):
    """The optimizer. As in DeepSpeed, both names mean AdamW: Adam with decoupled weight decay."""

    type: Annotated[Literal["AdamW", "Adam"], BeforeValidator(_optimizer_name)] = "AdamW"
    """"AdamW" or "Adam"; DeepSpeed's "Adam" decouples weight decay too."""
    params: AdamParams
    """Learning rate, betas, eps and weight decay."""


class Bf16Config(Section):
    """Training in bfloat16 with fp32 master weights."""

    enabled: bool = False
    """Compute in bfloat16; gradients are accumulated in fp32."""


class Fp16Config(Section):
    """fp16, which is refused for now."""

    enabled: Annotated[
        bool, refuse({True: 'fp16 is not yet supported; use "bf16": {"enabled": true}'})
    ] = False
    """Must be false."""


class OffloadOptimizerConfig(Section):
    """Where the optimizer's state lives and its step runs."""

    device: Annotated[
        Literal["none", "cpu"], refuse({"nvme": 'NVMe offload is not yet supported; use "cpu"'})
    ] = "none"
    """"cpu" keeps moments and master weights in host memory and steps there."""
    pin_memory: bool = True
    """Page-locked host memory, for copies that overlap with compute."""


class OffloadParamConfig(Section):
    """Offload of the parameters, which is refused for now."""

    device: Annotated[
        Literal["none"],
        refuse(
            dict.fromkeys(
                ("cpu", "nvme"),
                "parameter offload is not yet supported; offload the optimizer instead: "
                '"offload_optimizer": {"device": "cpu"}',
            )
        ),
    ] = "none"
    """Must be "none"."""


class ZeroConfig(Section):
    """How ZeRO shards the training state over the data-parallel ranks of a stage."""

    stage: Annotated[
        Literal[1, 3],
        refuse(
            {
                0: "plain data parallelism is not yet supported; use 1 (optimizer state sharded)",
                2: "ZeRO-2 is not yet supported by its number; use 1 with "
                '"parallel3d": {"pipeline": {"gradient_reduction": "per_microbatch"}}, which '
                "shards the gradients too",
            }
        ),
        BeforeValidator(_whole_number),
    ]
    """1 shards the optimizer's state; 3 shards gradients and parameters too."""
    offload_optimizer: OffloadOptimizerConfig = OffloadOptimizerConfig()
    """Optimizer state in host memory."""
    offload_param: OffloadParamConfig | None = None
    """Not yet supported."""
    contiguous_gradients: bool = True
    """Copy gradients to one buffer as they are produced, against fragmentation."""
    overlap_comm: bool | None = None
    """Overlap gradient reduction with backward; null means: at stage 3."""
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
