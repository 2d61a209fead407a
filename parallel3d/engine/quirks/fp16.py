"""Remedies for faults of DeepSpeed 0.19.8 under fp16, one function each."""

from collections.abc import Callable

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.base_optimizer import ZeROOptimizer


def expect_scaled_gradient(engine: DeepSpeedEngine) -> None:
    """Allow a direct backward under fp16; its gradient carries the last stage's loss scale.

    With a dynamic loss scale DeepSpeed raises after a direct backward unless `engine.scale` was
    called first. `scale` multiplies a loss, which only the last stage has.
    """
    engine._manual_backward_expected = True


def allow_fp16_on_cpu(device: torch.device) -> None:
    """Let DeepSpeed run fp16 on any CPU; it requires one with fp16 instructions."""

    def answer() -> bool:
        return True

    if device.type == "cpu":
        get_accelerator().is_fp16_supported = answer


def grow_scale_after_step(optimizer: ZeROOptimizer) -> Callable[[], None]:
    """Keep the loss scale from growing within a step; return a function to call after the step.

    DeepSpeed doubles the dynamic scale before it divides the gradients by it, which halves the
    gradients of those steps (and at ZeRO-3 the reported norm). An overflow, whose step is skipped,
    still lowers the scale at once; at the least scale DeepSpeed would raise a bare Exception on
    each rank, and `train/bad_steps.py` stops the run by name.
    """
    scaler = optimizer.loss_scaler
    scaler.raise_error_at_min_scale = False
    steps = [0]

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


def forget_skipped_gradients(optimizer: ZeROOptimizer) -> None:
    """Drop the gradients of a skipped step.

    At ZeRO-1 and 2 with an offloaded optimizer DeepSpeed keeps them and adds the next step's, so
    after one overflow every step overflows.
    """
    if not hasattr(optimizer, "fp16_groups"):
        for group in optimizer.averaged_gradients:
            optimizer.averaged_gradients[group] = None
