"""What DeepSpeed 0.19.8 does under fp16, and the remedy for each: one function a quirk."""

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator


def expect_scaled_gradient(engine: Any) -> None:
    """Let a direct backward pass under fp16: its gradient comes scaled from the last stage.

    DeepSpeed raises after a direct backward with a dynamic loss scale, unless `engine.scale` was
    called since the last one; what `scale` multiplies is a loss, which other stages do not have.
    """
    engine._manual_backward_expected = True


def allow_fp16_on_cpu(device: torch.device) -> None:
    """Let DeepSpeed run fp16 on any CPU; it asks for one that multiplies fp16 in hardware."""
    if device.type == "cpu":
        get_accelerator().is_fp16_supported = lambda: True


def at_last_loss_scale(optimizer: Any) -> bool:
    """Whether one more overflow would make DeepSpeed raise; keeps DeepSpeed from raising it."""
    scaler = optimizer.loss_scaler
    if not scaler.dynamic:
        return False
    scaler.raise_error_at_min_scale = False
    hysteresis = 1 if scaler.delayed_shift == 1 else scaler.cur_hysteresis
    return bool(hysteresis == 1 and scaler.cur_scale == scaler.min_scale)


def grow_scale_after_step(optimizer: Any) -> Callable[[], None]:
    """Keep the loss scale as it is until a step is done; gives what to call then.

    DeepSpeed doubles the dynamic scale first and then divides the gradients by it: in the steps in
    which it grows they are halved, at ZeRO-3 in the reported norm, too. An overflow, whose step is
    skipped, still takes effect at once.
    """
    scaler, steps = optimizer.loss_scaler, [0]

    def update_scale(has_overflow: bool = False) -> None:
        if has_overflow:
            scaler.update_scale(True)
        else:
            steps[0] += 1

    def finish() -> None:
        for _ in range(steps[0]):
            scaler.update_scale(False)
        steps[0] = 0

    optimizer._update_scale = update_scale
    return finish


def forget_skipped_gradients(optimizer: Any) -> None:
    """Drop what a skipped step leaves behind.

    At ZeRO-1 and 2 with an offloaded optimizer DeepSpeed keeps the sums of half-precision
    gradients, and adds the next step's to them: after one overflow every step overflows.
    """
    if not hasattr(optimizer, "fp16_groups"):
        for group in optimizer.averaged_gradients:
            optimizer.averaged_gradients[group] = None
