"""Process groups: the backend that a launch takes, and how groups are split off the world's.

Under NCCL, and under the strict backend as there, every rank of the world takes part in each split:
one call makes the groups of a whole axis (floor 1).
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parallel3d.mesh import strict

BACKEND = "PARALLEL3D_BACKEND"  # in the environment: "strict", or nothing


def choose_backend(device: torch.device) -> str:
    """The backend of process groups: the device's own, or what the environment names for tests."""
    # The pipeline's transfers are meant to be serialised; each rank would say that they are.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    if not (text := os.environ.get(BACKEND, "")):
        return dist.get_default_backend_for_device(device)
    options = strict.StrictOptions.from_text(text)
    strict.register(options, device.type)
    return strict.NAME


def options_of(backend: str, timeout: timedelta, urgent: bool = False) -> Any:
    """The options that a group of NCCL's is made with; None under other backends.

    `urgent`: its kernels go before the compute's where both are ready, so that what another rank
    waits for is not held up.
    """
    if backend != "nccl" or not hasattr(dist, "ProcessGroupNCCL"):
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = urgent
    options._timeout = timeout
    return options


def split(
    ranks: Sequence[Sequence[int]], name: str, timeout: timedelta, urgent: bool = False
) -> dist.ProcessGroup | None:
    """The group among `ranks` that holds this rank; None if there is none.

    `ranks` are lists of global ranks that do not overlap, the same on every rank. Collective over
    the world. Without a time-out of its own NCCL would give such a group 10 minutes.
    """
    world = dist.group.WORLD
    assert world is not None
    if isinstance(world, strict.StrictGroup):
        return strict.split_group(world, ranks, timeout=timeout, group_desc=name)
    if world.bound_device_id is not None:
        return dist.split_group(
            world,
            [list(members) for members in ranks],
            timeout=timeout,
            pg_options=options_of(dist.get_backend(), timeout, urgent),
            group_desc=name,
        )
    return strict.join_one_of(ranks, timeout=timeout, name=name)


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Let a group's operations fail after `timeout` from now on."""
    if isinstance(group, strict.StrictGroup):
        group.set_timeout(timeout)
    else:
        dist.distributed_c10d._set_pg_timeout(timeout, group)
