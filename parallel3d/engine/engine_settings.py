"""The engine's settings, taken from a run's config, and their translation for DeepSpeed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from parallel3d.base.section import Section
from parallel3d.config import ResolvedConfig
from parallel3d.config.parallel3d_block import gathered_for, reduces_once
from parallel3d.model import optimizers
from parallel3d.model.parametrization import Rate, Role, Scales
from parallel3d.models.common import rates_of
from parallel3d.schedule.sharding import Weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_BUCKET = 500_000_000  # DeepSpeed's own reduce_bucket_size


@dataclass(frozen=True)
class EngineSettings:
    """The settings of an engine.

    - `reduced_in`: the precision in which gradients are averaged over dp.
    - `optimizer`: the name of its file. `lr`, `eps` and `weight_decay` are those of its parameter
      groups; it reads its other settings from `params`.
    - `rates`: factors of the learning rate, eps and weight decay for each role of a parameter.
    - The dicts hold DeepSpeed's own keys: `zero_options` of `zero_optimization`,
      `optimizer_options` and `param_options` of its offload sections, `aio`, `fp16`.
    """

    micro_batch_size: int
    zero_stage: int = 3
    offload_optimizer: str = "none"
    offload_param: str = "none"
    precision: str = "fp32"
    reduced_in: str = "fp32"
    gradient_reduction: str = "per_step"
    weights: Weights = "per_microbatch"
    gradient_clipping: float = 0.0
    overlap_update: bool = False
    lr: float = 1e-3
    eps: float = 1e-8
    weight_decay: float = 0.0
    optimizer: str = "adamw"
    params: Section = field(
        default_factory=lambda: optimizers.load("adamw").Params.model_validate({"lr": 1e-3})
    )
    rates: Mapping[Role | None, Rate] = field(default_factory=Scales().rates)
    zero_options: dict[str, Any] = field(default_factory=dict)
    optimizer_options: dict[str, object] = field(default_factory=dict)
    param_options: dict[str, object] = field(default_factory=dict)
    aio: dict[str, object] = field(default_factory=dict)
    fp16: dict[str, object] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: ResolvedConfig) -> "EngineSettings":
        """Return the engine's settings from a run's config."""
        zero = config.zero_optimization
        params = config.optimizer.params
        own = config.parallel3d
        own_fields = {"stage", "offload_optimizer", "offload_param"}
        return cls(
            micro_batch_size=config.micro_batch_size,
            zero_stage=zero.stage,
            offload_optimizer=zero.offload_optimizer.device,
            offload_param=zero.offload_param.device,
            precision=config.precision,
            reduced_in=config.communication_data_type or "fp32",
            gradient_reduction=own.pipeline.gradient_reduction,
            weights=gathered_for(own.pipeline.weights),
            gradient_clipping=config.gradient_clipping,
            overlap_update=own.train.overlap_update and zero.stage == 3,
            lr=params.lr,
            eps=getattr(params, "eps", 0.0),
            weight_decay=getattr(params, "weight_decay", 0.0),
            optimizer=config.optimizer.file,
            params=params,
            rates=rates_of(own.model, params),
            zero_options=zero.model_dump(exclude=own_fields, exclude_none=True),
            optimizer_options=_options(zero.offload_optimizer, "device"),
            param_options=_options(zero.offload_param, "device"),
            aio=_options(config.aio),
            fp16=_options(config.fp16, "enabled"),
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters and activations."""
        return DTYPES[self.precision]

    @property
    def reduction_dtype(self) -> torch.dtype:
        """The dtype in which gradients are averaged over dp."""
        return DTYPES[self.reduced_in]

    @cached_property
    def shards_parameters(self) -> bool:
        """True if the parameters themselves are sharded over dp (ZeRO-3)."""
        return self.zero_stage == 3

    @property
    def reduce_bucket_size(self) -> int:
        """The number of elements that are reduced at a time."""
        return int(self.zero_options.get("reduce_bucket_size", _BUCKET))

    @cached_property
    def reduces_once(self) -> bool:
        """True if gradients are reduced once per step, not once per microbatch."""
        return reduces_once(self.zero_stage, self.gradient_reduction)

    @cached_property
    def holds_weights(self) -> bool:
        """True if the program gathers ZeRO-3's weights, not DeepSpeed's hooks."""
        return self.shards_parameters and self.weights != "per_microbatch"

    @cached_property
    def runs_without_hooks(self) -> bool:
        """True if passes need no hooks of DeepSpeed: they neither gather nor reduce."""
        return self.reduces_once and (self.holds_weights or not self.shards_parameters)

    @property
    def reduces_in_backward(self) -> bool:
        """True if a stage's last backward reduces the buckets that it fills."""
        overlaps = self.zero_options.get("overlap_comm", self.shards_parameters)
        return self.runs_without_hooks and bool(overlaps)

    def deepspeed_config(self, dp_size: int, elements: int | None = None) -> dict[str, object]:
        """Return the config for DeepSpeed, which shards over `dp_size` ranks.

        `elements`: this rank's number of parameters. DeepSpeed allocates buckets at full size, so
        they are limited to it.

        Stages 0, 1 and 2 all run as DeepSpeed's stage 2. Its stage 0 refuses a direct backward and
        coalescing; its stage 1 wraps bf16 in an optimizer that cannot coalesce. Our stage 0 shards
        over one rank, and the engine averages the gradients. Stages 1 and 2 differ only by
        `gradient_reduction`.
        """
        zero: dict[str, object] = {
            **self.zero_options,
            "stage": 3 if self.zero_stage == 3 else 2,
            # It would replace torch.nn.functional.linear globally; our layers do not need it.
            "memory_efficient_linear": False,
            # The check would report our Placeholders, which never get a gradient.
            "ignore_unused_parameters": True,
            "offload_optimizer": {"device": self.offload_optimizer, **self.optimizer_options},
            "offload_param": {"device": self.offload_param, **self.param_options},
        }
        if elements is not None:
            zero["reduce_bucket_size"] = min(self.reduce_bucket_size, max(elements, 1))
        if self.holds_weights:
            # The program gathers all weights; parameters that stay whole would only make DeepSpeed
            # gather them after each step, one by one, and wait for the device.
            zero["stage3_param_persistence_threshold"] = 0
        if self.shards_parameters and self.reduces_once:
            # Gradients accumulate in `param.grad`. Copying them through a bucket would cost a copy,
            # and the bucket would take memory beside the activations.
            zero["contiguous_gradients"] = False
        return {
            "train_batch_size": self.micro_batch_size * dp_size,
            "train_micro_batch_size_per_gpu": self.micro_batch_size,
            # A direct `output.backward(grad)` divides by this number on *every* stage. The executor
            # instead divides the loss once, on the last stage.
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self.gradient_clipping,
            "bf16": {"enabled": self.precision == "bf16"},
            "fp16": {"enabled": self.precision == "fp16", **self.fp16},
            "aio": self.aio,
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": self.reduced_in,
            "zero_optimization": zero,
            # The engine chooses the optimizer; torch's Adam on the host is correct, only slower.
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": None,
            # This timer would wait for the device before every forward, from the third step on.
            "timers": {"throughput": {"enabled": False}},
        }


def _options(section: Section, *exclude: str) -> dict[str, object]:
    """Return a section's settings under DeepSpeed's names, without the excluded ones."""
    return section.model_dump(exclude=set(exclude), exclude_none=True)
