"""What DeepSpeed 0.19.8 does around an update of the weights, and the remedy for each."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import Tensor

PART = 2**25  # elements: of bf16 64 MiB, and that twice


class _Buffer(NamedTuple):
    """A buffer of the host, and what waits until its last content has left."""

    memory: Tensor
    wait: Callable[[], object]
    mark: Callable[[], object]


def stage_weights(optimizer: Any, device: torch.device) -> None:
    """Have ZeRO-3 send the weights that the host has updated by parts of PART elements.

    After each group's update on the host DeepSpeed casts the new weights into memory that no device
    can read by itself, copies them, and waits for both. Here a part is on its way, through
    page-locked buffers, while the host casts the next one or begins with the next group's Adam.
    Weights that stay on the host take DeepSpeed's own way.
    """
    whole = optimizer._reassign_or_swap_out_partitioned_parameters
    buffers: list[_Buffer] = []
    sent = 0

    def send(group: int) -> None:
        nonlocal sent
        target, source = (
            groups[group]
            for groups in (
                optimizer.fp16_partitioned_groups_flat,
                optimizer.fp32_partitioned_groups_flat,
            )
        )
        if target.device != device or source.device.type != "cpu":
            whole(group)
            return
        if not buffers:
            longest = max(optimizer.fp16_partitioned_groups_flat_numel)
            buffers.extend(_buffer(min(PART, longest), target) for _ in range(2))
        for new, old in zip(source.data.split(PART), target.data.split(PART), strict=True):
            memory, wait, mark = buffers[sent % 2]
            sent += 1
            wait()
            staged = memory[: len(new)].copy_(new)
            # On the stream that the next step's gathers are issued on: they come behind it.
            old.copy_(staged, non_blocking=True)
            mark()
        optimizer._unflatten_partitioned_parameters(group)

    optimizer._reassign_or_swap_out_partitioned_parameters = send


def _buffer(size: int, like: Tensor) -> _Buffer:
    if like.device.type == "cpu":  # copies there are waited for
        return _Buffer(torch.empty(size, dtype=like.dtype), _nothing, _nothing)
    left = torch.get_device_module(like.device).Event()
    memory = torch.empty(size, dtype=like.dtype, pin_memory=True)
    return _Buffer(memory, left.synchronize, left.record)


def _nothing() -> None:
    """There is nothing to wait for."""


def share_with_weights(optimizer: Any) -> None:
    """Let a master be the weights that it is of, where both lie on one device in one type.

    DeepSpeed keeps both, 4 bytes an element of this rank's share for nothing, and copies one into
    the other after Adam. To be called before the first step.
    """
    is_zero3 = hasattr(optimizer, "fp16_groups")
    settings = ("offload_optimizer", "offload_param") if is_zero3 else ("cpu_offload",)
    if any(getattr(optimizer, name) for name in settings):
        return  # on a CPU both would lie on one device all the same
    if is_zero3:
        masters, weights = (
            optimizer.fp32_partitioned_groups_flat,
            optimizer.fp16_partitioned_groups_flat,
        )
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
        if own is not None and _alike(master, own):
            master.data = own.data
    if not is_zero3:
        optimizer._link_all_hp_params()  # it has views of the masters


def _alike(master: Tensor, weights: Tensor) -> bool:
    return (
        master.dtype == weights.dtype
        and master.device == weights.device
        and master.shape == weights.shape
    )


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
