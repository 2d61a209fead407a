"""What in DeepSpeed 0.19.8 keeps a resumed run from the bits of an unbroken one, and the remedy."""

from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam


def power_afresh(optimizer: torch.optim.Optimizer) -> None:
    """Make CPU Adam's bias correction a function of the step number alone.

    Its compiled part keeps betas to the power of the step as running fp32 products, and takes the
    true power only where the step number jumps: a resumed run's first step jumps, so it and all
    later ones differ in the last bits. A call without elements before each step makes each a jump.
    """
    if isinstance(optimizer, DeepSpeedCPUAdam):
        optimizer.register_step_pre_hook(_jump)


def _jump(adam: Any, *_: Any) -> None:
    nothing, group = torch.empty(0), adam.param_groups[0]
    beta1, beta2 = group["betas"]
    options = group["lr"], beta1, beta2, group["eps"], group["weight_decay"]
    bias_correction = group["bias_correction"]
    adam.ds_opt_adam.adam_update(
        adam.opt_id, 0, *options, bias_correction, nothing, nothing, nothing, nothing
    )
