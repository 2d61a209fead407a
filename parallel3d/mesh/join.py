"""How the processes of a launch find each other, over which network, and how they end (floor 1)."""

import ipaddress
import os
import re
import resource
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

from parallel3d.base.errors import RankError, TrainingError, pack_error, unpack_error
from parallel3d.mesh.device_marks import DeviceMarks
from parallel3d.mesh.groups import BACKEND, choose_backend, options_of
from parallel3d.mesh.launch import Launch, describe_variables
from parallel3d.mesh.pulse import rank as pulse

_START = "rank 0 starts"  # key in the store: "", or the error that kept rank 0 from starting
_SPOKEN = "rank 0 has spoken"  # key in the store
_ADDRESS = "an address between nodes"  # key in the store
_ARRIVED = "ranks that know their interface"  # key in the store
_STORE_SECONDS = 5.0  # after which a store that refuses connections is gone
_PATIENCE = timedelta(seconds=30)  # for ranks that may not have reached the store yet
# Ranks that no launcher we know has started: seconds from the start of a process until its message,
# and how long it waits for the others at least.
_SECONDS_OF_UNKNOWN = 25.0
_LEAST_SECONDS_OF_UNKNOWN = 5.0
STARTUP_TIMEOUT = timedelta(minutes=30)  # data preparation and compilation happen under it
_MOST_FILES = 2**20  # some containers allow 2^30, and subprocesses close each of them

# The store of the first rendezvous; rank 0 serves it until it ends.
_store: dist.Store | None = None
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
        store = meet(launch, _PATIENCE)
        heard = [f"rank {rank} has heard it" for rank in range(1, launch.world_size)]
        if launch.rank == 0:
            store.set(_START, pack_error(error))
            store.set(_SPOKEN, "yes")
            # A rank that uses the store after it has gone prints a stack trace.
            store.wait(heard, timedelta(seconds=5) if dist.is_initialized() else _PATIENCE)
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
    allow_open_files()
    backend = choose_backend(device)
    if launch.world_size == 1 and "MASTER_ADDR" not in os.environ:
        store: dist.Store = dist.HashStore()
        dist.init_process_group(backend, None, STARTUP_TIMEOUT, 1, 0, store)
        return
    store = meet(launch, STARTUP_TIMEOUT)
    if launch.rank == 0:
        store.set(_START, "")
    elif problem := store.get(_START).decode():
        raise unpack_error(problem)
    choose_interface(launch, store, STARTUP_TIMEOUT.total_seconds())
    if backend == "nccl":
        # gloo's groups beside NCCL's, whose rings and trees have few neighbours, connect two ranks
        # when they first communicate, not all pairs at the start.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if watched and not pulse.is_watched():
        host = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        # Other ranks may reach this host by the store's address, by its own address, or by name.
        known_by = (host, address_towards(host), socket.gethostname())
        names = [name for name in known_by if name]
        pulse.begin(
            launch.rank,
            launch.world_size,
            (host, port),
            names,
            publish=lambda address: store.set("arbiter", address),
            fetch=lambda: store.get("arbiter").decode(),
        )
        if device.type != "cpu":
            pulse.follow(DeviceMarks(device))
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
    """Return one line on an error of the backend, which another rank may have caused; else ""."""
    # gloo raises plain RuntimeErrors: "[<source file>] <reason>. This is typically ..."
    text = re.sub(r"^\[[^]]*gloo/[^]]*\] ", "", str(error)).partition(". This is typically")[0]
    is_lost = isinstance(error, dist.DistError) or text != str(error)
    return (
        f"a collective failed; another rank may have died or be silent ({text})" if is_lost else ""
    )


def meet(launch: Launch, patience: timedelta) -> dist.Store:
    """Return the store through which the ranks find each other; waits up to `patience`.

    Raises RankError if the port is taken, or the other ranks do not come.
    """
    global _store
    # Here, because rank 0 may refuse to start, and say so, before it joins.
    os.environ.setdefault("MASTER_ADDR", socket.gethostname())
    os.environ.setdefault("MASTER_PORT", str(launch.port))
    if _store is None:
        _refuse_lost_store()
        wait = patience
        if not launch.is_known:
            wait = min(patience, _patience_of_unknown())
            _refuse_unknown_host(wait)
        try:
            _store, *_ = next(
                dist.rendezvous("env://", launch.rank, launch.world_size, timeout=wait)
            )
        except dist.DistError as error:
            raise RankError(_not_met(launch, str(error).partition("\n")[0], wait)) from None
        _store.set_timeout(patience)
    store = _store
    # On one node torchrun's store survives a restart; on several, `--rdzv_backend c10d` renews it.
    if launch.local_world_size == launch.world_size:
        store = dist.PrefixStore(f"attempt {launch.restart_count}", store)
    # With the same keys, addresses of a destroyed group would be taken for those of the new one.
    return dist.PrefixStore(f"group {_times_joined}", store) if _times_joined else store


def _not_met(launch: Launch, reason: str, wait: timedelta) -> str:
    """Return the message of a rank that found no others, for the store's own `reason`."""
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if re.search("listen|EADDRINUSE", reason):
        return (
            f"cannot serve the ranks' store at {place} ({reason}); end the process that has this "
            "port, or set MASTER_PORT to a free one"
        )
    met = (
        f"the {launch.world_size} ranks have not met at {place} within {wait.seconds} s ({reason})"
    )
    if launch.is_known:
        return f"{met}. Start all ranks, with a MASTER_ADDR that each can reach"
    return (
        f"{met}. The launcher is not one that parallel3d knows; found {describe_variables()}. "
        "Start all ranks at once, with a MASTER_ADDR that each can reach, or use deepspeed, "
        "torchrun, srun or mpirun"
    )


def _refuse_lost_store() -> None:
    """Raise TrainingError if the store that torchrun serves refuses connections.

    It was there before the ranks, so it is not late but gone.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    deadline = time.monotonic() + _STORE_SECONDS
    while True:
        try:
            socket.create_connection(place, timeout=_STORE_SECONDS).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise TrainingError(
                    f"torchrun's store at {place[0]}:{place[1]} refuses connections: torchrun has "
                    "ended, or its port is closed. Start the same command again"
                ) from None
            time.sleep(0.2)
        except OSError:  # torch knows more about names and networks
            return


def _refuse_unknown_host(wait: timedelta) -> None:
    """Raise RankError if MASTER_ADDR is no host after `wait`, in which a cluster may name it.

    torch would look for it as long, and print its own stack.
    """
    host = os.environ["MASTER_ADDR"]
    deadline = time.monotonic() + wait.total_seconds()
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RankError(
                    f"MASTER_ADDR = {host}: no host has this name ({error.strerror}); set it to "
                    "the name or the address of rank 0's host"
                ) from None
            time.sleep(0.5)


def _patience_of_unknown() -> timedelta:
    """Return how long ranks of an unknown launcher wait for each other."""
    age = time.time() - psutil.Process().create_time()
    return timedelta(seconds=max(_LEAST_SECONDS_OF_UNKNOWN, _SECONDS_OF_UNKNOWN - age))


def allow_open_files() -> None:
    """Raise this process's limit of open files to its maximum: gloo needs a socket per peer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # macOS has another, lower limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def choose_interface(launch: Launch, store: dist.Store, seconds: float) -> None:
    """Have gloo and NCCL use the interface that leads to the other nodes, where gloo would not.

    gloo listens on the address of the host's own name, often 127.0.1.1, which other nodes cannot
    reach. Variables that are set in the environment stay. Collective over several nodes; takes at
    most `seconds`.
    """
    if launch.local_world_size == launch.world_size:
        return
    address = address_towards(os.environ["MASTER_ADDR"])
    if not is_local(address):
        store.set(_ADDRESS, address)
    store.add(_ARRIVED, 1)
    if not is_local(address_of_host()):
        return
    if is_local(address):
        # The master is this host, by its own name: another node's address shows the interface.
        deadline = time.monotonic() + seconds
        while store.add(_ARRIVED, 0) < launch.world_size and time.monotonic() < deadline:
            time.sleep(0.05)
        if not store.check([_ADDRESS]):
            return  # all ranks are on this host
        address = address_towards(store.get(_ADDRESS).decode())
    if name := interface_of(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # exactly this name, not a prefix


def address_of_host() -> str:
    """Return the address of the host's own name; "" if it has none."""
    with suppress(OSError):
        return str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    return ""


def address_towards(host: str) -> str:
    """Return this host's address on the route to another; "" without a route. Sends nothing."""
    with suppress(OSError):
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as s:
            s.connect(place)
            return str(s.getsockname()[0])
    return ""


def is_local(address: str) -> bool:
    """True if an address is missing or no other host can reach it."""
    return not address or ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_of(address: str) -> str:
    """Return the name of the network interface that has an address; "" if none has."""
    for name, own in psutil.net_if_addrs().items():
        if address in [known.address for known in own]:
            return str(name)
    return ""
