"""How the processes of a launch find each other and how they end together (floor 1)."""

import os
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from parallel3d.base.errors import pack_error, unpack_error
from parallel3d.mesh import interfaces
from parallel3d.mesh.groups import BACKEND, choose_backend, options_of
from parallel3d.mesh.launch import Launch
from parallel3d.mesh.pulse import rank as pulse

_START = "rank 0 starts"  # key in the store: "", or the error that kept rank 0 from starting
_SPOKEN = "rank 0 has spoken"  # key in the store
_PATIENCE = timedelta(seconds=30)  # for ranks that may not have reached the store yet
_HEARD = timedelta(seconds=5)  # for ranks in the group to acknowledge rank 0's final message
STARTUP_TIMEOUT = timedelta(minutes=30)  # data preparation and compilation happen under it

_store: dist.Store | None = None  # of the first rendezvous; rank 0 serves it until it ends
_times_joined = 0


def rank_0_first(launch: Launch, speak: Callable[[], None], error: Exception) -> None:
    """Run `speak` on rank 0 and hold the other ranks until it is done, at most 30 s.

    A launcher that sees one rank end kills the others at once, and rank 0's message would be lost.
    Ranks that wait in `join` raise `error`.
    """
    if launch.rank == 0:
        speak()
    if launch.world_size == 1:
        return
    with suppress(Exception):  # the other ranks cannot be reached any more
        store = _meet(launch, _PATIENCE)
        heard = [f"rank {rank} has heard it" for rank in range(1, launch.world_size)]
        if launch.rank == 0:
            store.set(_START, pack_error(error))
            store.set(_SPOKEN, "yes")
            # A rank that uses the store after it has gone prints a stack trace.
            store.wait(heard, _HEARD if dist.is_initialized() else _PATIENCE)
        else:
            store.wait([_SPOKEN], _PATIENCE)
            store.set(heard[launch.rank - 1], "yes")


def join(launch: Launch, device: torch.device, watched: bool = False) -> None:
    """Make the process group of all processes, unless it exists.

    `watched`: start a sentry beside each rank. Raises the error that rank 0 met before it joined.
    Ranks that have left their group (`Mesh.close`) may join again, all of them together.
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
    store = _meet(launch, STARTUP_TIMEOUT)
    if launch.rank == 0:
        store.set(_START, "")
    elif problem := store.get(_START).decode():
        raise unpack_error(problem)
    interfaces.choose_interface(launch, store, STARTUP_TIMEOUT.total_seconds())
    if backend == "nccl":
        interfaces.connect_on_demand()
    if watched and not pulse.is_watched():
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # Other ranks may reach this host by the store's address, by its own address, or by name.
        names = list(filter(None, [host, interfaces.address_towards(host), socket.gethostname()]))
        arbiter = partial(store.set, "arbiter"), lambda: store.get("arbiter").decode()
        pulse.begin(launch.rank, launch.world_size, (host, port), names, *arbiter)
        pulse.doing("making the process groups")
    dist.init_process_group(
        backend,
        store=store,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=STARTUP_TIMEOUT,
        device_id=device if device.type != "cpu" and BACKEND not in os.environ else None,
        # An axis that holds every rank uses this group, so it is as urgent as the others.
        pg_options=options_of(backend, STARTUP_TIMEOUT, urgent=True),
    )
    _times_joined += 1


def lost_peer(error: Exception) -> str:
    """Return one line on an error that says another rank died or is silent; else ""."""
    # gloo raises plain RuntimeErrors: "[<source file>] <reason>. This is typically ..."
    text = re.sub(r"^\[[^]]*gloo/[^]]*\] ", "", str(error)).partition(". This is typically")[0]
    is_lost = isinstance(error, dist.DistError) or text != str(error)
    return f"another rank died or is silent, so this one ends ({text})" if is_lost else ""


def _meet(launch: Launch, patience: timedelta) -> dist.Store:
    """Return the store through which the ranks find each other."""
    global _store
    # Here, because rank 0 may refuse to start, and say so, before it joins.
    os.environ.setdefault("MASTER_ADDR", socket.gethostname())
    os.environ.setdefault("MASTER_PORT", "29500")
    if _store is None:
        _store, *_ = next(
            dist.rendezvous("env://", launch.rank, launch.world_size, timeout=patience)
        )
    store = _store
    # On one node torchrun's store survives a restart; on several, `--rdzv_backend c10d` renews it.
    if launch.local_world_size == launch.world_size:
        store = dist.PrefixStore(f"attempt {launch.restart_count}", store)
    # With the same keys, addresses of a destroyed group would be taken for those of the new one.
    return dist.PrefixStore(f"group {_times_joined}", store) if _times_joined else store
