"""The ranks' means to talk: interfaces, sockets, open files (floor 1)."""

import ipaddress
import os
import resource
import socket
import time
from contextlib import suppress

import psutil
import torch.distributed as dist

from parallel3d.mesh.launch import Launch

_ADDRESS, _ARRIVED = "an address between nodes", "ranks that know their interface"  # in the store
_MOST_FILES = 2**20  # some containers allow 2^30, and programs that start others close them all


def allow_open_files() -> None:
    """Raise this process's limit of open files to its maximum: gloo takes a socket per peer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # macOS has another limit below this one
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def connect_on_demand() -> None:
    """Have gloo connect two ranks when they first talk, instead of every two at the start.

    For the groups beside NCCL's, whose rings and trees have a few neighbours.
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def choose_interface(launch: Launch, store: dist.Store, seconds: float) -> None:
    """Have gloo and NCCL use the interface that leads to the other nodes, where gloo would not.

    gloo listens at the address of the host's own name, often 127.0.1.1, where no other node finds
    it. What the environment sets stays. Collective over several nodes, at most `seconds` long.
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
        # The master is this host, by the same name: what comes from elsewhere shows the way.
        deadline = time.monotonic() + seconds
        while store.add(_ARRIVED, 0) < launch.world_size and time.monotonic() < deadline:
            time.sleep(0.05)
        if not store.check([_ADDRESS]):
            return  # all of them are on this host
        address = address_towards(store.get(_ADDRESS).decode())
    if name := interface_of(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # this one, not what begins so


def address_of_host() -> str:
    """The address of the host's own name; "" if it has none."""
    with suppress(OSError):
        return str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    return ""


def address_towards(host: str) -> str:
    """The address of this host on the way to another, nothing sent; "" if there is no way."""
    with suppress(OSError):
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as s:
            s.connect(place)
            return str(s.getsockname()[0])
    return ""


def is_local(address: str) -> bool:
    """Whether an address, or the lack of one, is out of reach of every other host."""
    return not address or ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_of(address: str) -> str:
    """The name of the network interface that has an address; "" if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address == address for found in addresses):
            return str(name)
    return ""
