"""Registers the strict backend with torch, and splits groups as NCCL does (floor 1)."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch.distributed as dist

from parallel3d.mesh.strict.communicator import Communicator
from parallel3d.mesh.strict.group import DEFAULT_TIMEOUT, StrictGroup
from parallel3d.mesh.strict.options import NAME, StrictOptions
from parallel3d.mesh.strict.watch import QueueWatch


def register(options: StrictOptions, device: str = "cpu") -> None:
    """Make "strict" a backend of torch's, for the CPU and this type of `device`.

    Groups that are made from now on have these `options`.
    """
    watch: QueueWatch | None = None

    def create(made: Any, _: Any) -> StrictGroup:
        nonlocal watch
        ranks = made.global_ranks_in_group or range(made.group_size)
        if watch is None or watch.is_closed:  # the world's group, which is the first
            watch = QueueWatch(made.store.clone(), made.group_rank, made.group_size)
        queue = Communicator(
            made.store,
            rank=made.group_rank,
            ranks=ranks,
            seconds=made.timeout.total_seconds(),
            watch=watch,
            options=options,
        )
        return StrictGroup(queue)

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=sorted({"cpu", device}))


def split_group(
    parent: StrictGroup,
    split_ranks: Sequence[Sequence[int]],
    timeout: timedelta | None = None,
    group_desc: str | None = None,
) -> dist.ProcessGroup | None:
    """Split `parent`, the world, as NCCL does: every rank of it must call this.

    None for a rank that is in none of `split_ranks`, global ranks that do not overlap.
    """
    content = crc32(str(list(map(list, split_ranks))).encode())
    parent.split(f"{group_desc} into {len(split_ranks)} ({content:08x})")
    return join_one_of(split_ranks, timeout or DEFAULT_TIMEOUT, group_desc)


def join_one_of(
    ranks: Sequence[Sequence[int]], timeout: timedelta, name: str | None
) -> dist.ProcessGroup | None:
    """Make the groups of `split_group` one after another, where a backend cannot split."""
    mine = None
    for members in ranks:
        # torch counts the groups to name them, so each rank must make each, its own or not. That
        # costs nothing; a group of one is named after its rank.
        alone = len(members) == 1
        if not alone or dist.get_rank() in members:
            group = dist.new_group(
                list(members), timeout=timeout, use_local_synchronization=alone, group_desc=name
            )
            mine = group if dist.get_rank() in members else mine
    return mine
