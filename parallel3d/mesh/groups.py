"""Process groups: the backend that a launch takes, and how groups are split off (floor 1).

Under NCCL every rank takes part in each split: one call makes the groups of a whole axis.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from parallel3d.base.errors import ConfigError

BACKEND = "PARALLEL3D_BACKEND"  # in the environment: "package.module:name,settings", or nothing


def choose_backend(device: torch.device) -> str:
    """Return the backend of process groups: the device's own, or what the environment names.

    The environment may name a function that registers a backend with torch, for tests: it is called
    with the settings and the device's type, and returns the name. Raises ConfigError without one.
    """
    # The pipeline's transfers are meant to be serialised; each rank would say that they are.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    if not (text := os.environ.get(BACKEND, "")):
        return dist.get_default_backend_for_device(device)
    place, _, settings = text.partition(",")
    module, _, name = place.partition(":")
    try:
        register = getattr(import_module(module), name)
    except (AttributeError, ImportError, ValueError) as error:
        raise ConfigError(
            f'the environment has {BACKEND} = "{text}": cannot be imported ({error}); write '
            '"package.module:name", or unset it to train'
        ) from None
    return str(register(settings, device.type))


def options_of(backend: str, timeout: timedelta, urgent: bool = False) -> Any:
    """The options of a group of NCCL's; None under other backends.

    `urgent`: its kernels go before the compute's where both are ready.
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

    `ranks` are disjoint lists of global ranks, the same on every rank. Collective over the world.
    """
    world = dist.group.WORLD
    assert world is not None
    if hasattr(world, "split_among"):  # a backend from the environment that splits as NCCL does
        mine: dist.ProcessGroup | None = world.split_among(ranks, timeout, name)
        return mine
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
    """Make the groups of `split` one after another, where a backend cannot split."""
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


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Let a group's operations fail after `timeout` from now on."""
    if hasattr(group, "split_among"):
        group.set_timeout(timeout)
    else:
        dist.distributed_c10d._set_pg_timeout(timeout, group)
