"""What the engine needs of a run's config, and its translation into DeepSpeed's words."""

from dataclasses import dataclass, field
from typing import Any

import torch

from parallel3d.config import RunConfig
from parallel3d.engine import quirks


@dataclass(frozen=True)
class EngineSettings:
    """The engine's section of a config.

    `zero_options` are DeepSpeed's own keys of `zero_optimization` (bucket sizes, ZeRO-3's
    thresholds), handed on as they are.
    """

    micro_batch_size: int
    zero_stage: int = 3
    offload_optimizer: str = "none"
    pin_memory: bool = False
    precision: str = "fp32"
    gradient_reduction: str = "per_step"
    gradient_clipping: float = 0.0
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    zero_options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: RunConfig) -> "EngineSettings":
        """The engine's section of a run's config."""
        zero, adam = config.zero_optimization, config.optimizer.params
        ours = {"stage", "offload_optimizer", "offload_param"}
        return cls(
            micro_batch_size=config.micro_batch_size,
            zero_stage=zero.stage,
            offload_optimizer=zero.offload_optimizer.device,
            pin_memory=zero.offload_optimizer.pin_memory,
            precision="bf16" if config.bf16.enabled else "fp32",
            gradient_reduction=config.pipeline.gradient_reduction,
            gradient_clipping=config.gradient_clipping,
            lr=adam.lr,
            betas=adam.betas,
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            zero_options=zero.model_dump(exclude=ours, exclude_none=True),
        )

    @property
    def dtype(self) -> torch.dtype:
        """The type of parameters and activations."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16}[self.precision]

    @property
    def shards_parameters(self) -> bool:
        """Whether the parameters themselves are cut over the data-parallel group (ZeRO-3)."""
        return self.zero_stage == 3

    def deepspeed_config(self, dp_size: int) -> dict[str, Any]:
        """The config that DeepSpeed sees.

        ZeRO-1 is DeepSpeed's stage 2 here: its stage 1 wraps bf16 in an optimizer that cannot
        coalesce, and the two differ only in whether a microbatch's gradients are reduced at once,
        which `gradient_reduction` says.
        """
        zero: dict[str, Any] = {
            **self.zero_options,
            "stage": 3 if self.zero_stage == 3 else 2,
            # It would replace torch.nn.functional.linear for good; our layers do not need it.
            "memory_efficient_linear": False,
            "offload_optimizer": {"device": self.offload_optimizer, "pin_memory": self.pin_memory},
        }
        return {
            "train_batch_size": self.micro_batch_size * dp_size,
            "train_micro_batch_size_per_gpu": self.micro_batch_size,
            "gradient_accumulation_steps": quirks.accumulation_steps(),
            "gradient_clipping": self.gradient_clipping,
            "bf16": {"enabled": self.precision == "bf16"},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
            "zero_optimization": zero,
            # Torch's Adam on the host is right, only slower; we choose the optimizer ourselves.
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": None,
        }
