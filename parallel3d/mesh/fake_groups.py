"""Process groups of one process that send nothing, to measure what a rank of them would do."""

from collections.abc import Iterable

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


def make_fake_groups(sizes: Iterable[int]) -> dict[int, dist.ProcessGroup]:
    """Return a group of each size, of which this process is the last rank.

    The last rank has the largest part of what they divide. The process must not have joined a
    process group.
    """
    sizes = {*sizes}
    world = max(sizes)
    dist.init_process_group("fake", store=FakeStore(), rank=world - 1, world_size=world)
    return {size: dist.new_group(list(range(world - size, world))) for size in sizes}
