"""What the engine needs of a run's config, and its translation into DeepSpeed's words."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from parallel3d.base.section import Section
from parallel3d.config import RunConfig
from parallel3d.config.parallel3d_block import gathered_for, reduces_once
from parallel3d.engine.quirks import core
from parallel3d.model.parametrization import Rate, Role, Scales
from parallel3d.models.common import scales_of
from parallel3d.schedule.sharding import Weights

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_BUCKET = 500_000_000  # DeepSpeed's own reduce_bucket_size


@dataclass(frozen=True)
class EngineSettings:
    """The engine's section of a config.

    `reduced_in` is the type that gradients are averaged over dp in; `rates` is what each role's are
    multiplied by. The dicts are DeepSpeed's own keys of ZeRO, of the offload sections, and so on.
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
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    rates: Mapping[Role | None, Rate] = field(default_factory=Scales().rates)
    zero_options: dict[str, Any] = field(default_factory=dict)
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    param_options: dict[str, Any] = field(default_factory=dict)
    aio: dict[str, Any] = field(default_factory=dict)
    fp16: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: RunConfig) -> "EngineSettings":
        """The engine's section of a run's config."""
        zero, adam, pipeline = config.zero_optimization, config.optimizer.params, config.pipeline
        ours = {"stage", "offload_optimizer", "offload_param"}
        return cls(
            micro_batch_size=config.micro_batch_size, zero_stage=zero.stage,
            offload_optimizer=zero.offload_optimizer.device,
            offload_param=zero.offload_param.device, precision=config.precision,
            reduced_in=config.communication_data_type or "fp32",
            gradient_reduction=pipeline.gradient_reduction, weights=gathered_for(pipeline.weights),
            gradient_clipping=config.gradient_clipping,
            overlap_update=config.train.overlap_update and zero.stage == 3, lr=adam.lr,
            betas=adam.betas, eps=adam.eps, weight_decay=adam.weight_decay,
            rates=scales_of(config.model).rates(),
            zero_options=zero.model_dump(exclude=ours, exclude_none=True),
            optimizer_options=_options(zero.offload_optimizer, "device"),
            param_options=_options(zero.offload_param, "device"), aio=_options(config.aio),
            fp16=_options(config.fp16, "enabled"),
        )  # fmt: skip

    @property
    def dtype(self) -> torch.dtype:
        """The type of parameters and activations."""
        return _DTYPES[self.precision]

    @property
    def reduction_dtype(self) -> torch.dtype:
        """The type that gradients have while they are averaged over dp."""
        return _DTYPES[self.reduced_in]

    @property
    def shards_parameters(self) -> bool:
        """Whether the parameters themselves are cut over the data-parallel group (ZeRO-3)."""
        return self.zero_stage == 3

    @property
    def shard_axis(self) -> str:
        """The mesh axis that DeepSpeed shards over: "self" where nothing is sharded (ZeRO-0)."""
        return "self" if self.zero_stage == 0 else "dp"

    @property
    def reduce_bucket_size(self) -> int:
        """Elements that are reduced at a time."""
        size: int = self.zero_options.get("reduce_bucket_size", _BUCKET)
        return size

    @property
    def reduces_once(self) -> bool:
        """Whether gradients are reduced once a step."""
        return reduces_once(self.zero_stage, self.gradient_reduction)

    @property
    def holds_weights(self) -> bool:
        """Whether ZeRO-3's weights are gathered by the program, not by DeepSpeed's hooks."""
        return self.shards_parameters and self.weights != "per_microbatch"

    @property
    def runs_without_hooks(self) -> bool:
        """Whether passes need nothing of DeepSpeed: no gather and no reduction happens in them."""
        return self.reduces_once and (self.holds_weights or not self.shards_parameters)

    @property
    def reduces_in_backward(self) -> bool:
        """Whether buckets that a stage's last backward fills are reduced within it."""
        overlap = self.zero_options.get("overlap_comm")
        wanted: bool = self.shards_parameters if overlap is None else overlap
        return self.runs_without_hooks and wanted

    def deepspeed_config(self, dp_size: int, elements: int | None = None) -> dict[str, Any]:
        """Return the config that DeepSpeed sees, which shards over `dp_size` ranks.

        Its buckets are allocated whole: none is larger than this rank's `elements`.
        Stages 0, 1 and 2 are DeepSpeed's stage 2 here: its stage 0 refuses a direct backward and
        coalescing, its stage 1 wraps bf16 in an optimizer that cannot coalesce. Stage 0 shards over
        one rank, and the engine averages the gradients; 1 and 2 differ by `gradient_reduction`.
        """
        zero: dict[str, Any] = {
            **self.zero_options,
            "stage": 3 if self.zero_stage == 3 else 2,
            # It would replace torch.nn.functional.linear for good; our layers do not need it.
            "memory_efficient_linear": False,
            # Its check takes our Ballast for a parameter that was forgotten.
            "ignore_unused_parameters": True,
            "offload_optimizer": {"device": self.offload_optimizer, **self.optimizer_options},
            "offload_param": {"device": self.offload_param, **self.param_options},
        }
        if elements is not None:
            zero["reduce_bucket_size"] = min(self.reduce_bucket_size, max(elements, 1))
        if self.shards_parameters and self.reduces_once and zero.get("reduce_scatter", True):
            # Gradients that add up in their own places would be copied into a bucket to be copied
            # out of it again, and the bucket stands beside the activations of every step.
            zero["contiguous_gradients"] = False
        return {
            "train_batch_size": self.micro_batch_size * dp_size,
            "train_micro_batch_size_per_gpu": self.micro_batch_size,
            "gradient_accumulation_steps": core.accumulation_steps(),
            "gradient_clipping": self.gradient_clipping,
            "bf16": {"enabled": self.precision == "bf16"},
            "fp16": {"enabled": self.precision == "fp16", **self.fp16},
            "aio": self.aio,
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": self.reduced_in,
            "zero_optimization": zero,
            # Torch's Adam on the host is right, only slower; we choose the optimizer ourselves.
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": None,
            # From the third step on it would wait for the device before every forward.
            "timers": {"throughput": {"enabled": False}},
        }


def _options(section: Section, *exclude: str) -> dict[str, Any]:
    """A section's settings under DeepSpeed's names."""
    return section.model_dump(exclude=set(exclude), exclude_none=True)
