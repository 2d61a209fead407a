"""Run DeepSpeed 0.19.8's gradient reductions without its hooks, when the program asks for them.

Gradients that are reduced once per step accumulate in `param.grad`. DeepSpeed's hooks, two dozen
calls per parameter and microbatch, are removed; the functions below call what the hooks would have
called at the end of the step.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import Tensor, nn

from parallel3d.mesh.mesh import Peers
from parallel3d.mesh.transfer import reduce_scatter_single


def remove_gradient_hooks(optimizer: ZeROOptimizer) -> None:
    """Remove DeepSpeed's hooks from the parameters' gradients."""
    for hook in optimizer._grad_acc_hooks:
        hook.remove()


def average_in_one_buffer(
    optimizer: ZeROOptimizer, dtype: torch.dtype, copies: Peers, sums_copies: bool
) -> None:
    """Make ZeRO-3 average gradients in `dtype` by one collective, and one copy per gradient.

    DeepSpeed loops over the ranks for each gradient (12 ms of host time per layer at 512 ranks),
    and casts a gradient only if `dtype` differs from the parameters' dtype, not the gradient's.

    - `copies`: the ranks with copies of this rank's shards.
    - `sums_copies`: sum each average over them, too; otherwise `sum_over_copies` does so later.
    """
    name = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"

    def average(parameters: list[nn.Parameter], _: torch.dtype) -> list[Tensor]:
        group = optimizer._get_param_partition_group(parameters[0])
        gradients = [p.grad.flatten() for p in parameters if p.grad is not None]
        # Experts are averaged over all ranks that send them tokens, not over their replicas alone.
        ranks = optimizer.dp_process_group.size() * copies.size
        parts = _reduce_scatter(gradients, dtype, group, ranks, copies if sums_copies else None)
        return [part.to(optimizer.gradient_accumulation_dtype) for part in parts]

    setattr(optimizer, name, average)


def sum_over_copies(optimizer: ZeROOptimizer, dtype: torch.dtype, copies: Peers) -> None:
    """Sum ZeRO-3's shards of the microbatches' gradients over their copies, at the step's end.

    They may lie in host memory, so they pass through the device in parts of a bucket's size.
    """
    device = get_accelerator().current_device_name()
    for part in optimizer.grad_partitions_flat_buffer.split(optimizer.reduce_bucket_size):
        on_device = part.to(device, dtype)
        dist.all_reduce(on_device, group=copies.group)
        part.copy_(on_device)


def reduce_in_gradients_type(optimizer: ZeROOptimizer) -> None:
    """Make ZeRO-1 and 2 keep the type of accumulated gradients in the buckets that they reduce.

    DeepSpeed copies them into buckets of the weights' type, which rounds an fp32 sum of
    microbatches to bf16 (by 0.2 % of the gradient's norm) before it is averaged.
    """
    name = "_gradient_reduction_buffer_dtype"
    setattr(optimizer, name, lambda: optimizer.gradient_accumulation_dtype)


def average_over_copies(optimizer: ZeROOptimizer, copies: Peers) -> None:
    """Make ZeRO-1 and 2 average this rank's part of each bucket over the copies of its shard, too.

    In half precision DeepSpeed adds the parts to their fp32 sums while it averages them. Here it
    finds no sums then, and adds afterwards.
    """
    average = optimizer.average_tensor

    def average_all(bucket: Tensor, dtype: torch.dtype) -> None:
        with patch.object(optimizer, "_get_compact_grad_partition_slice", _no_sums):
            average(bucket, dtype)
        accelerator = get_accelerator()
        stream = accelerator.current_stream()
        if optimizer.overlap_comm:
            stream = optimizer.reduction_stream
        with accelerator.stream(stream):
            own = _own_parts(optimizer, bucket, dtype)
            if own:
                flat = torch.cat(own).to(dtype).div_(copies.size)
                dist.all_reduce(flat, group=copies.group)
                for part, mean in zip(own, flat.split([len(part) for part in own]), strict=True):
                    part.copy_(mean)
            optimizer._add_full_reduction_to_compact_grad_partition(bucket, dtype)

    optimizer.average_tensor = average_all


def _no_sums(*_: object) -> None:
    """Stand for a gradient without an fp32 sum."""


def _own_parts(optimizer: ZeROOptimizer, bucket: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return the parts of ZeRO-1's or 2's bucket that this rank keeps, in their order."""
    parts = []
    at = 0
    for group, index, number in optimizer.ipg_buckets[dtype].params:
        numel = optimizer.bit16_groups[group][index].numel()
        rank = optimizer.real_dp_process_group[group].rank()
        start = optimizer.grad_start_offset[group][rank].get(number)
        if start is not None:
            into = optimizer.grad_partition_insertion_offset[group][rank][number]
            kept = min(numel - start, optimizer.partition_size[group] - into)
            parts.append(bucket.narrow(0, at + start, kept))
        at += numel
    return parts


def _reduce_scatter(
    gradients: Sequence[Tensor],
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    divisor: int,
    copies: Peers | None = None,
) -> list[Tensor]:
    """Sum flat tensors over the group, divided by `divisor`; return this rank's part of each.

    Those parts alone are then summed over `copies`.
    """
    ranks = group.size()
    rank = group.rank()
    lengths = [-(-len(g) // ranks) for g in gradients]  # each part's; the last ones are shorter
    buffer = gradients[0].new_empty((ranks, sum(lengths)), dtype=dtype)
    starts = list(accumulate(lengths, initial=0))
    for gradient, start, length in zip(gradients, starts, lengths, strict=False):
        full_rows, rest = divmod(len(gradient), length)
        columns = buffer.narrow(1, start, length)
        columns[:full_rows] = gradient[: full_rows * length].view(full_rows, length)
        if rest:
            columns[full_rows, :rest] = gradient[full_rows * length :]
    buffer.div_(divisor)
    averages = buffer.new_empty(buffer.shape[1])
    reduce_scatter_single(averages, buffer.flatten(), group=group)
    if copies is not None and copies.size > 1:
        dist.all_reduce(averages, group=copies.group)
    return [
        averages[start : start + max(0, min(length, len(g) - rank * length))]
        for g, start, length in zip(gradients, starts, lengths, strict=False)
    ]


def begin(engine: DeepSpeedEngine) -> None:
    """Begin a step, in which each gradient is complete when it is reduced."""
    engine.set_gradient_accumulation_boundary(True)
    engine.optimizer.set_gradient_accumulation_boundary(True)


def reduce_now(engine: DeepSpeedEngine, parameters: Iterable[nn.Parameter]) -> None:
    """Reduce the gradients of these parameters, keep this rank's part and free the rest.

    At ZeRO-3 this also works inside `coalesce_grad_reduction`, which reduces the others on exit.
    """
    optimizer = engine.optimizer
    coalescing = optimizer._coalesce_grad_reduction
    boundary = optimizer.is_gradient_accumulation_boundary()
    optimizer._coalesce_grad_reduction = False
    optimizer.set_gradient_accumulation_boundary(True)
    if hasattr(optimizer, "fp16_groups"):
        for parameter in parameters:
            optimizer.reduce_ready_partitions_and_remove_grads(parameter)
        for dtype in list(optimizer.ipg_buckets):
            # Otherwise the buckets would wait until they are full or the step is over.
            optimizer._DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads(dtype)
    else:
        ids = {id(parameter) for parameter in parameters}
        optimizer.setup_buckets()
        if optimizer.overlap_comm and not get_accelerator().resolves_data_dependency():
            # The previous stage may still be reduced from the bucket that is filled here.
            get_accelerator().current_stream().wait_stream(optimizer.reduction_stream)
        for group, members in enumerate(optimizer.bit16_groups):
            for parameter in members:
                if id(parameter) in ids:
                    optimizer.reduce_ready_partitions_and_remove_grads(parameter, group)
        optimizer.reduce_ipg_grads()
    optimizer._coalesce_grad_reduction = coalescing
    optimizer.set_gradient_accumulation_boundary(boundary)


def finish(engine: DeepSpeedEngine) -> None:
    """Finish the step's reductions; the optimizer's step then uses their results."""
    engine.optimizer.overlapping_partition_gradients_reduce_epilogue()
