"""Orders between streams that DeepSpeed 0.19.8 leaves open, one function each.

On a synchronous device (the CPU) there are no streams, and none of them does anything.
"""

from collections.abc import Sequence
from typing import Any

from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

_GATHER_STREAM = "_PartitionedParameterCoordinator__allgather_stream"


def keep_gradients_until_reduced(optimizer: Any) -> None:
    """Keep the memory of ZeRO-3's gradients until the reduction stream has read them.

    A rank that holds no part of a small parameter frees the gradient without recording the stream
    (stage3.py `partition_grads`), so the allocator may give its memory to the next kernels of the
    default stream while the reduction still reads it.
    """
    if get_accelerator().is_synchronized_device():
        return
    partition = optimizer.partition_grads

    def record_and_partition(
        parameters: Sequence[nn.Parameter], parts: Sequence[Tensor]
    ) -> list[Tensor]:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.record_stream(optimizer.reduce_and_partition_stream)
        buffers: list[Tensor] = partition(parameters, parts)
        return buffers

    optimizer.partition_grads = record_and_partition


def gather_after_update(optimizer: Any) -> None:
    """Let ZeRO-3's next gathers wait for the update of the shards; call it after a step.

    Gathers run on a stream of their own, which does not wait for the default stream. DeepSpeed
    relies on a synchronisation that happens only where parameters stay whole (`_post_step`).
    """
    if not get_accelerator().is_synchronized_device():
        coordinator = optimizer.parameter_offload.get_param_coordinator()
        getattr(coordinator, _GATHER_STREAM).wait_stream(get_accelerator().current_stream())


def hurry_reductions(optimizer: Any) -> None:
    """Give the stream of gradient reductions a high priority: synchronous collectives run on it."""
    if get_accelerator().is_synchronized_device():
        return
    for name in ("reduce_and_partition_stream", "reduction_stream"):
        stream = getattr(optimizer, name, None)
        if stream is not None and stream != get_accelerator().default_stream():
            setattr(optimizer, name, get_accelerator().Stream(priority=-1))
