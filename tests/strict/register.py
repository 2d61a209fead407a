"""Registers the strict backend with torch (floor 1)."""

from typing import Any

import torch.distributed as dist

from tests.strict.communicator import Communicator
from tests.strict.group import StrictGroup
from tests.strict.options import NAME, StrictOptions
from tests.strict.watch import QueueWatch


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
