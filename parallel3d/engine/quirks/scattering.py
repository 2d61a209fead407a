"""Average ZeRO-1's and 2's gradients by reduce-scatters: half the bytes of DeepSpeed's all-reduces.

DeepSpeed 0.19.8 sums each bucket on all ranks, and every rank keeps its own part. A reduce-scatter
needs parts of one size, so it takes the place of an all-reduce where the ranks' parts are nearly
equal: complete gradients are dealt into such buckets, whichever rank owns the first of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import Tensor, nn

from parallel3d.mesh.transfer import reduce_scatter_single

_PADDED = 1.5  # a reduce-scatter moves half the bytes, so padding beyond 2 would move more
_METHOD = "allreduce_and_copy_with_multiple_ranks"

Rows = list[list[Tensor]]
"""The parts of flat gradients that each rank of a group keeps."""


def scatter_even_buckets(optimizer: ZeROOptimizer) -> None:
    """Make a reduction of a bucket that all ranks keep equal parts of a reduce-scatter."""
    reduce = getattr(optimizer, _METHOD)

    def scatter(parts: Sequence[Tensor], dtype: torch.dtype, **options: Any) -> None:
        group = options["process_group"]
        rows: Rows = [[] for _ in range(group.size())]
        for part, owners in zip(parts, options["bucket_ranks"], strict=True):
            for owner in owners:
                rows[owner].append(part)
        if not _are_even(rows):
            reduce(parts, dtype, **options)
            return
        _average(rows, dtype, group, divisor=1)
        _take(optimizer, parts, dtype, **options)

    setattr(optimizer, _METHOD, scatter)


@contextmanager
def averaged(
    optimizer: ZeROOptimizer, parameters: Iterable[nn.Parameter], dtype: torch.dtype
) -> Iterator[None]:
    """Average these complete gradients if their parts are even; DeepSpeed then only takes them.

    They are sent in buckets of its size. What other ranks keep is left as it is.
    """
    ids = {id(parameter) for parameter in parameters}
    rows_of: dict[dist.ProcessGroup, Rows] = {}
    for group, members in enumerate(optimizer.bit16_groups):
        ranks = optimizer.real_dp_process_group[group]
        rows = rows_of.setdefault(ranks, [[] for _ in range(ranks.size())])
        for parameter in members:
            if id(parameter) in ids:
                _deal(optimizer, group, parameter, rows)
    # With `overlap_comm`, DeepSpeed's buckets are reduced behind the backward pass.
    if optimizer.overlap_comm or not all(map(_are_even, rows_of.values())):
        yield
        return
    for ranks, rows in rows_of.items():
        size = max(1, optimizer.reduce_bucket_size // ranks.size())
        cuts = [_cut(row, size) for row in rows]
        for number in range(max(map(len, cuts))):
            chunk = [cut[number] if number < len(cut) else [] for cut in cuts]
            # An expert's gradient is a sum over all ranks, of which its replicas are a part.
            _average(chunk, dtype, ranks, optimizer.dp_process_group.size())
    with (
        patch.object(optimizer, _METHOD, partial(_take, optimizer)),
        patch.object(optimizer, "gradient_average", False),
    ):
        yield


def _deal(optimizer: ZeROOptimizer, group: int, parameter: nn.Parameter, rows: Rows) -> None:
    """Append the parts of a parameter's gradient to those of the ranks that keep them."""
    gradient = optimizer.get_gradient_for_reduction(parameter).view(-1)
    number = optimizer.get_param_id(parameter)
    for rank, row in enumerate(rows):
        start = optimizer.grad_start_offset[group][rank].get(number)
        if start is not None:
            into = optimizer.grad_partition_insertion_offset[group][rank][number]
            row.append(gradient[start : start + optimizer.partition_size[group] - into])


def _are_even(rows: Rows) -> bool:
    """Return True if parts that are filled up to the longest are little more than all parts."""
    lengths = [sum(map(len, row)) for row in rows]
    return len(lengths) * max(lengths) <= _PADDED * sum(lengths)


def _cut(parts: Iterable[Tensor], size: int) -> Rows:
    """Return flat tensors in lists of `size` elements; the last one may be shorter."""
    lists: Rows = []
    room = 0
    for part in parts:
        rest = part
        while len(rest):
            if not room:
                lists.append([])
                room = size
            lists[-1].append(rest[:room])
            rest = rest[room:]
            room -= len(lists[-1][-1])
    return lists


def _average(rows: Rows, dtype: torch.dtype, group: dist.ProcessGroup, divisor: int) -> None:
    """Sum each row over the group, sent in `dtype` and divided before, into its rank's own parts.

    All parts have one dtype; rows are filled up to the longest.
    """
    own = rows[group.rank()]
    lengths = [sum(map(len, row)) for row in rows]
    like = next(part for row in rows for part in row)
    buffer = like.new_empty((len(rows), max(lengths)))
    for row, length, place in zip(rows, lengths, buffer, strict=True):
        if row:
            torch.cat(row, out=place[:length])
    sent = buffer.div_(divisor).to(dtype)
    total = sent[0]
    if len(rows) > 1:
        total = torch.empty_like(total)
        reduce_scatter_single(total, sent.flatten(), group=group)
    at = 0
    for part in own:
        part.copy_(total[at : at + len(part)])
        at += len(part)


def _take(
    optimizer: ZeROOptimizer, parts: Sequence[Tensor], _: torch.dtype, **options: Any
) -> None:
    """Add this rank's parts of a bucket, which are averaged, to its sums where it has any."""
    rank = options["process_group"].rank()
    each = zip(parts, options["bucket_ranks"], options["output_bucket"], strict=True)
    for part, owners, output in each:
        if rank in owners:
            optimizer._add_to_grad_partition_buffer(output, part)
