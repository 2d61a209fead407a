"""How the processes of a launch find each other, and how they part (floor 1)."""

import os
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from parallel3d.base.errors import packed, unpacked
from parallel3d.mesh import interfaces
from parallel3d.mesh.device import claim_device, identity_of
from parallel3d.mesh.groups import BACKEND, choose_backend, options_of
from parallel3d.mesh.launch import Launch
from parallel3d.mesh.pulse import rank as pulse

_START = "rank 0 starts"  # in the store: "", or the error that it met before it could
_SPOKEN = "rank 0 has spoken"
_PATIENCE = timedelta(seconds=30)  # for ranks that may still be on their way to the store
_HEARD = timedelta(seconds=5)  # for ranks that have met, until they have heard rank 0's last words
STARTUP_TIMEOUT = timedelta(minutes=30)  # data preparation and compilation happen under it

_store: dist.Store | None = None  # where the ranks met first: rank 0 keeps it to its end
_times_joined = 0


def rank_0_first(launch: Launch, speak: Callable[[], None], error: Exception) -> None:
    """Run `speak` on rank 0, and keep the others until it is done, or 30 s are over.

    A launcher that sees one rank end ends the others at once. Ranks that wait in `join` raise
    `error`.
    """
    if launch.rank == 0:
        speak()
    if launch.world_size == 1:
        return
    with suppress(Exception):  # nobody can be told any more
        store = _meet(launch, _PATIENCE)
        heard = [f"rank {rank} has heard it" for rank in range(1, launch.world_size)]
        if launch.rank == 0:
            store.set(_START, packed(error))
            store.set(_SPOKEN, "yes")
            # A rank that still asks when the store is gone prints a stack trace.
            store.wait(heard, _HEARD if dist.is_initialized() else _PATIENCE)
        else:
            store.wait([_SPOKEN], _PATIENCE)
            store.set(heard[launch.rank - 1], "yes")


def join(launch: Launch, device: torch.device, watched: bool = False) -> None:
    """Make the process group of all processes, unless there is one.

    `watched`: with a sentry beside each rank. Raises what rank 0 met on its way here. Ranks that
    have left their group (`Mesh.close`) may join again, all of them.
    """
    global _times_joined
    if dist.is_initialized():
        return
    interfaces.allow_open_files()
    backend = choose_backend(device)
    if launch.world_size == 1 and "MASTER_ADDR" not in os.environ:
        store: dist.Store = dist.HashStore()
        dist.init_process_group(backend, None, STARTUP_TIMEOUT, 1, 0, store)
        return
    os.environ.setdefault("MASTER_ADDR", socket.gethostname())
    os.environ.setdefault("MASTER_PORT", "29500")
    store = _meet(launch, STARTUP_TIMEOUT)
    if launch.rank == 0:
        store.set(_START, "")
    elif problem := store.get(_START).decode():
        raise unpacked(problem)
    interfaces.choose_interface(launch, store, STARTUP_TIMEOUT.total_seconds())
    if backend == "nccl":
        interfaces.connect_on_demand()
        claim_device(identity_of(device), launch, store)
    if watched and not pulse.is_watched():
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # Others may reach this host as they do the store, by its address on the way there, by name.
        names = list(filter(None, [host, interfaces.address_towards(host), socket.gethostname()]))
        judge = partial(store.set, "judge"), lambda: store.get("judge").decode()
        pulse.begin(launch.rank, launch.world_size, (host, port), names, *judge)
        pulse.doing("making the process groups")
    dist.init_process_group(
        backend,
        store=store,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=STARTUP_TIMEOUT,
        device_id=device if device.type != "cpu" and BACKEND not in os.environ else None,
        # An axis that holds every rank has this group, so it is as urgent as theirs.
        pg_options=options_of(backend, STARTUP_TIMEOUT, urgent=True),
    )
    _times_joined += 1


def lost_peer(error: Exception) -> str:
    """One line on an error if it says that another rank died or is silent; else ""."""
    # gloo's errors are plain RuntimeErrors: "[<source file>] <reason>. This is typically ..."
    text = re.sub(r"^\[[^]]*gloo/[^]]*\] ", "", str(error)).partition(". This is typically")[0]
    is_lost = isinstance(error, dist.DistError) or text != str(error)
    return f"another rank died or is silent; this one ends, too ({text})" if is_lost else ""


def _meet(launch: Launch, patience: timedelta) -> dist.Store:
    """The store through which the ranks find each other."""
    global _store
    if _store is None:
        _store, *_ = next(
            dist.rendezvous("env://", launch.rank, launch.world_size, timeout=patience)
        )
    store = _store
    # On one node torchrun's store outlives a restart; on several `--rdzv_backend c10d` renews it.
    if launch.local_world_size == launch.world_size:
        store = dist.PrefixStore(f"attempt {launch.restart_count}", store)
    # In the same place the addresses of a group that is gone would be taken for the new one's.
    return dist.PrefixStore(f"group {_times_joined}", store) if _times_joined else store
