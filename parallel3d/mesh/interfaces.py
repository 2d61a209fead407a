"""Network interfaces, sockets and open files that the ranks communicate through (floor 1)."""

import ipaddress
import os
import resource
import socket
import time
from contextlib import suppress

import psutil
import torch.distributed as dist

from parallel3d.mesh.launch import Launch

_ADDRESS, _ARRIVED = (
    "an address between nodes",
    "ranks that know their interface",
)  # keys in the store
_MOST_FILES = 2**20  # some containers allow 2^30, and subprocesses close each of them


def allow_open_files() -> None:
    """Raise this process's limit of open files to its maximum: gloo needs a socket per peer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # macOS has another, lower limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def connect_on_demand() -> None:
    """Have gloo connect two ranks when they first communicate, not all pairs at the start.

    For the groups beside NCCL's, whose rings and trees have few neighbours.
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


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
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, own in interfaces if address in (a.address for a in own)), "")
