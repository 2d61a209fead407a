"""DeepSpeed 0.19.8's update on the host: new weights on their way while the host goes on.

ZeRO-3 with its optimizer on the host updates group by group. After each it copies the group's new
weights to the device: torch casts them into memory that it makes anew and that the device cannot
read by itself, and the host waits for both. Here they go by parts through page-locked buffers: a
part is on its way while the host casts the next one, or begins with the next group's Adam.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

PART = 2**25  # elements: of bf16 64 MiB, and that twice


class _Buffer(NamedTuple):
    """A buffer of the host, and what waits until its last content has left."""

    memory: Tensor
    wait: Callable[[], object]
    mark: Callable[[], object]


def stage_weights(optimizer: Any, device: torch.device) -> None:
    """Have ZeRO-3 send the weights that the host has updated by parts of PART elements.

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
