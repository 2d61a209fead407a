"""Remedies for missing synchronisation of streams in DeepSpeed 0.19.8, one function each.

They do nothing on a synchronous device (the CPU), which has no streams.
"""

from collections.abc import Sequence

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import Tensor, nn

_GATHER_STREAM = "_PartitionedParameterCoordinator__allgather_stream"


def keep_gradients_until_reduced(optimizer: ZeROOptimizer) -> None:
    """Keep the memory of ZeRO-3's gradients until the reduction stream has read them.

    A rank without a part of a small parameter frees the gradient without recording the stream
    (stage3.py `partition_grads`). The allocator may then reuse the memory on the default stream
    while the reduction still reads it.
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


def gather_after_update(optimizer: ZeROOptimizer) -> None:
    """Make ZeRO-3's next gathers wait for the update of the shards; call it after a step.

    Gathers run on their own stream, which does not wait for the default stream. DeepSpeed relies on
    a synchronisation that happens only if some parameters are kept whole (`_post_step`).
    """
    if not get_accelerator().is_synchronized_device():
        coordinator = optimizer.parameter_offload.get_param_coordinator()
        getattr(coordinator, _GATHER_STREAM).wait_stream(get_accelerator().current_stream())


def prioritize_reductions(optimizer: ZeROOptimizer) -> None:
    """Give the stream of gradient reductions high priority: synchronous collectives run on it."""
    if get_accelerator().is_synchronized_device():
        return
    for name in ("reduce_and_partition_stream", "reduction_stream"):
        stream = getattr(optimizer, name, None)
        if stream is not None and stream != get_accelerator().default_stream():
            setattr(optimizer, name, get_accelerator().Stream(priority=-1))
