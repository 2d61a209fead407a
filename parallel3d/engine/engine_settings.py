"""The engine's settings, taken from a run's config, and their translation for DeepSpeed."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from parallel3d.base.section import Section
from parallel3d.config import ResolvedConfig
from parallel3d.config.deepspeed import AioConfig, Fp16Config, OptimizerConfig, ZeroConfig
from parallel3d.config.parallel3d_block import EmaConfig
from parallel3d.model.parametrization import Rate, Role
from parallel3d.models.common import rates_of
from parallel3d.schedule.sharding import Weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class EngineSettings:
    """The part of a run's config that an engine reads.

    - `weights`: how long ZeRO-3's weights stay gathered.
    - `reduces_once`: gradients are reduced once per step, not once per microbatch.
    - `rates`: factors of the learning rate, eps and weight decay for each role of a parameter.
    - `precision`: of parameters and activations.
    - `reduced_in`: the precision in which gradients are averaged over dp.
    - `overlap_update`: copy new weights to the device while the host updates the next ones.
    - `ema`: the average of the weights that is kept; None keeps none.
    """

    micro_batch_size: int
    zero: ZeroConfig
    weights: Weights
    reduces_once: bool
    optimizer: OptimizerConfig
    rates: Mapping[Role | None, Rate]
    precision: str
    reduced_in: str
    gradient_clipping: float
    overlap_update: bool
    fp16: Fp16Config
    aio: AioConfig
    ema: EmaConfig | None = None

    @classmethod
    def from_config(cls, config: ResolvedConfig) -> "EngineSettings":
        """Return the engine's settings from a run's config."""
        own = config.parallel3d
        return cls(
            micro_batch_size=config.micro_batch_size,
            zero=config.zero_optimization,
            weights=own.pipeline.gathered_weights,
            reduces_once=own.pipeline.reduces_once(config.zero_optimization.stage),
            optimizer=config.optimizer,
            rates=rates_of(own.model, config.optimizer.params),
            precision=config.precision,
            reduced_in=config.communication_data_type or "fp32",
            gradient_clipping=config.gradient_clipping,
            overlap_update=own.train.overlap_update and config.zero_optimization.stage == 3,
            fp16=config.fp16,
            aio=config.aio,
            ema=own.train.ema,
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
        return self.zero.stage == 3

    @property
    def eps(self) -> float:
        """The optimizer's eps; 0 if it has none."""
        return float(getattr(self.optimizer.params, "eps", 0.0))

    @property
    def weight_decay(self) -> float:
        """The optimizer's weight decay; 0 if it has none."""
        return float(getattr(self.optimizer.params, "weight_decay", 0.0))

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
        overlaps = self.zero.overlap_comm
        if overlaps is None:
            overlaps = self.shards_parameters
        return self.runs_without_hooks and overlaps

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
            **_options(self.zero),
            "stage": 3 if self.shards_parameters else 2,
            # It would replace torch.nn.functional.linear globally; our layers do not need it.
            "memory_efficient_linear": False,
            # The check would report our Placeholders, which never get a gradient.
            "ignore_unused_parameters": True,
        }
        offload = self.zero.offload_optimizer
        if self.ema and offload.device == "nvme":
            # The average is swapped with the states, through a buffer more at each place.
            places = 1 + offload.pipeline_read + offload.pipeline_write
            count = offload.buffer_count + places
            zero["offload_optimizer"] = _options(offload) | {"buffer_count": count}
        if elements is not None:
            zero["reduce_bucket_size"] = min(self.zero.reduce_bucket_size, max(elements, 1))
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
            "fp16": _options(self.fp16) | {"enabled": self.precision == "fp16"},
            "aio": _options(self.aio),
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


def _options(section: Section) -> dict[str, object]:
    """Return a section's settings, and those of sections in it, under DeepSpeed's names."""
    return section.model_dump(exclude_none=True)
