"""Remedies for DeepSpeed 0.19.8's updates of weights, one function each."""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.utils import combine_grad_norm_groups
from torch import Tensor

PART = 2**25  # elements of each of the two buffers: 64 MiB in bf16


def copy_weights_in_parts(optimizer: ZeROOptimizer, device: torch.device) -> None:
    """Make ZeRO-3 copy weights that the host has updated to the device in parts of PART elements.

    After each group's update on the host DeepSpeed casts the new weights into pageable memory,
    copies them, and waits for both. Here a part is copied from a page-locked buffer while the host
    casts the next part or runs the next group's Adam. Weights that stay on the host are updated by
    DeepSpeed itself.
    """
    copy_at_once = optimizer._reassign_or_swap_out_partitioned_parameters
    buffers: list[tuple[Tensor, Any]] = []
    sent = 0

    def send(group: int) -> None:
        nonlocal sent
        target = optimizer.fp16_partitioned_groups_flat[group]
        source = optimizer.fp32_partitioned_groups_flat[group]
        if target.device != device or source.device.type != "cpu":
            copy_at_once(group)
            return
        if not buffers:
            longest = max(optimizer.fp16_partitioned_groups_flat_numel)
            buffers.extend(_buffer(min(PART, longest), target) for _ in range(2))
        for new, old in zip(source.data.split(PART), target.data.split(PART), strict=True):
            memory, copied = buffers[sent % 2]
            sent += 1
            copied.synchronize()
            staged = memory[: len(new)].copy_(new)
            # On the stream of the next step's gathers, so they run after it.
            old.copy_(staged, non_blocking=True)
            copied.record()
        optimizer._unflatten_partitioned_parameters(group)

    optimizer._reassign_or_swap_out_partitioned_parameters = send


def _buffer(size: int, like: Tensor) -> tuple[Tensor, Any]:
    """Return a host buffer, and the event after the last copy from it, which a CPU needs not."""
    memory = torch.empty(size, dtype=like.dtype, pin_memory=like.device.type != "cpu")
    return memory, torch.get_device_module(like.device).Event()


@contextmanager
def asking_before_update(
    optimizer: ZeROOptimizer, is_kept: Callable[[Tensor], bool]
) -> Iterator[list[Tensor]]:
    """Let DeepSpeed's step update nothing unless `is_kept(norm)`, by the norm before clipping.

    After the norm DeepSpeed decides whether to update anything at all: an infinite norm ends the
    step on every rank, and drops its gradients. A refused step takes this way, without lowering
    the loss scale; then the list that is yielded has its norm. DeepSpeed does not ask about a step
    that it has found to overflow.
    """
    is_zero3 = hasattr(optimizer, "fp16_groups")
    name = "_get_norm_groups" if is_zero3 else "scaled_global_norm"
    compute = getattr(optimizer, name)
    update_scale = optimizer._update_scale
    refused: list[Tensor] = []

    def judged() -> object:
        norms = compute()
        norm = combine_grad_norm_groups(norms) if is_zero3 else norms
        unscaled = norm / optimizer.loss_scale
        if is_kept(unscaled):
            return norms
        refused.append(unscaled)
        infinite = torch.full_like(norm, math.inf)
        return [infinite] if is_zero3 else infinite

    def update(overflow: bool = False) -> None:
        if not refused:
            update_scale(overflow)

    with patch.object(optimizer, name, judged), patch.object(optimizer, "_update_scale", update):
        yield refused


def leave_overflow_to_norm(optimizer: ZeROOptimizer) -> None:
    """Make ZeRO-1 and 2 in bf16 look at the norm alone for gradients that are not finite.

    DeepSpeed looks at each gradient before: a dozen operators each, two collectives, and a wait of
    the host. The norm carries what is not finite, and such a step is then skipped alike, as in fp32
    and at ZeRO-3. Without DeepSpeed's `check_grad_overflow` it would update the weights.
    """
    if optimizer.dtype == torch.bfloat16 and not hasattr(optimizer, "fp16_groups"):
        optimizer.check_overflow = _keep
        optimizer.update_offload_overflow_tracker = _keep


def _keep(*_: object, **__: object) -> None:
    """Leave what was found as it is."""


def group_of(optimizer: ZeROOptimizer, index: int) -> int:
    """Return the parameter group of a flat master; ZeRO-3 splits large groups into several."""
    groups = getattr(optimizer, "sub_group_to_group_id", None)
    return index if groups is None else int(groups[index])


def leave_unclipped(optimizer: ZeROOptimizer, groups: Collection[int]) -> None:
    """Do not clip the gradients of these parameter groups; they still count in the norm."""
    unscale_and_clip = optimizer.unscale_and_clip_grads

    def unscale(which: int | list[Tensor], norm: Tensor) -> None:
        """`which`: at ZeRO-3 the index of a flat master, else a list with its gradient."""
        if isinstance(which, int):
            index = which
        else:
            masters = optimizer.single_partition_of_fp32_groups
            index = next(n for n, master in enumerate(masters) if master.grad is which[0])
        limit = 0.0 if group_of(optimizer, index) in groups else optimizer.clip_grad
        with patch.object(optimizer, "clip_grad", limit):
            unscale_and_clip(which, norm)

    optimizer.unscale_and_clip_grads = unscale


def share_with_weights(optimizer: ZeROOptimizer) -> None:
    """Let masters share the weights' memory if both have the same device and dtype.

    DeepSpeed keeps two copies, which wastes 4 bytes per element of this rank's shard, and copies
    one to the other after Adam. Call it before the first step.
    """
    is_zero3 = hasattr(optimizer, "fp16_groups")
    settings = ("offload_optimizer", "offload_param") if is_zero3 else ("cpu_offload",)
    if any(getattr(optimizer, name) for name in settings):
        return  # on a CPU the device would be the same nevertheless
    if is_zero3:
        masters = optimizer.fp32_partitioned_groups_flat
        weights = optimizer.fp16_partitioned_groups_flat
    else:
        masters = optimizer.single_partition_of_fp32_groups
        weights = [
            parts[group.rank()]
            for parts, group in zip(
                optimizer.parallel_partitioned_bit16_groups,
                optimizer.real_dp_process_group,
                strict=True,
            )
        ]
    for master, own in zip(masters, weights, strict=True):
        if _layout(master) == _layout(own):
            master.data = own.data
    if not is_zero3:
        optimizer._link_all_hp_params()  # renew its views of the masters


def _layout(x: Tensor) -> tuple[torch.dtype, torch.device, torch.Size]:
    return x.dtype, x.device, x.shape


def recompute_bias_correction(adam: torch.optim.Optimizer) -> None:
    """Make CPU Adam's bias correction depend on the step number only.

    Its C++ code updates the powers of the betas as running fp32 products, and computes the exact
    power only if the step number jumps. A resumed run's first step jumps, so its weights differ in
    the last bits. An empty call at step 0 before each step makes every step a jump.
    """
    adam.register_step_pre_hook(_jump)


def _jump(adam: Any, *_: object) -> None:
    empty = torch.empty(0)
    group = adam.param_groups[0]
    beta1, beta2 = group["betas"]
    options = group["lr"], beta1, beta2, group["eps"], group["weight_decay"]
    bias_correction = group["bias_correction"]
    adam.ds_opt_adam.adam_update(
        adam.opt_id, 0, *options, bias_correction, empty, empty, empty, empty
    )
