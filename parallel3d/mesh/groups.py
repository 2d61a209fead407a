"""Process groups: choosing the backend of a launch, and splitting groups off the world (floor 1).

Under NCCL every rank takes part in each split, so one call makes all groups of an axis.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module

import torch
import torch.distributed as dist

# An environment variable, normally unset: "package.module:name,settings".
BACKEND = "PARALLEL3D_BACKEND"


def choose_backend(device: torch.device) -> str:
    """Return the backend of process groups: the device's default, or the one in the environment.

    For tests, the environment may name a function that registers a backend with torch. It is called
    with the settings and the device's type, and returns the backend's name.
    """
    # The pipeline's transfers are serialised on purpose; each rank would warn about it.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    text = os.environ.get(BACKEND, "")
    if not text:
        return dist.get_default_backend_for_device(device)
    place, _, settings = text.partition(",")
    module, _, name = place.partition(":")
    return str(getattr(import_module(module), name)(settings, device.type))


def options_of(backend: str, timeout: timedelta, urgent: bool = False) -> object:
    """Return the options of an NCCL group; None for other backends.

    `urgent`: its kernels are scheduled before compute kernels when both are ready.
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
    """Return the group among `ranks` that contains this rank; None if there is none.

    `ranks` are disjoint lists of global ranks, equal on all ranks. Collective over the world.
    """
    world = dist.group.WORLD
    assert world is not None
    if hasattr(world, "split_among"):  # a test backend that splits as NCCL does
        own: dist.ProcessGroup | None = world.split_among(ranks, timeout, name)
        return own
    if world.bound_device_id is not None:
        return dist.split_group(
            world,
            [list(members) for members in ranks],
            timeout=timeout,
            pg_options=options_of(dist.get_backend(), timeout, urgent),
            group_desc=name,
        )
    return join_one_of(ranks, timeout, name)


def join_one_of(
    ranks: Sequence[Sequence[int]], timeout: timedelta, name: str
) -> dist.ProcessGroup | None:
    """Make the groups of `split` one after another, for backends that cannot split."""
    own = None
    for members in ranks:
        # torch numbers groups to name them, so each rank must make every group, also those without
        # it. That costs nothing. A group of one rank is named after the rank instead.
        alone = len(members) == 1
        if not alone or dist.get_rank() in members:
            group = dist.new_group(
                list(members), timeout=timeout, use_local_synchronization=alone, group_desc=name
            )
            own = group if dist.get_rank() in members else own
    return own


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of a group's operations from now on."""
    if hasattr(group, "split_among"):
        group.set_timeout(timeout)
    else:
        dist.distributed_c10d._set_pg_timeout(timeout, group)
