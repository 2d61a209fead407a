"""Sums over ranks of one host through memory that they share, where gloo would use TCP (floor 1).

gloo passes even the ranks of one host each byte through the kernel: a sum of 1 MiB over two ranks
costs each 1.3 ms of CPU, here 0.3. Each rank shows its piece of a tensor, says so to the others,
and adds theirs in the order of ranks: the same bits on every rank. It is the caller's own work, so
it is done when the call returns, with the data still in the caches. Small tensors, devices, and
groups of several hosts stay with their backend.

Two slots a rank take turns: a rank that shows its next piece has read the others' last one, so the
piece before that one may be overwritten.
"""

import hashlib
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.mesh.single import all_gather_single

LEAST = 2**16  # bytes of a tensor; of smaller ones gloo's bytes cost little
PIECE = 2**22  # bytes that a rank shows at a time
_MOST_RANKS = 8  # each reads what all others show
_PATIENCE = 30.0  # seconds, while the ranks of a host meet
_SECONDS = 1800.0  # that a rank may be late, until `set_timeout`
_SHOWN = struct.Struct("=QQ")  # the number of the piece, and its bytes


class SharedMemory:
    """Memory that a group's ranks share, and the sockets on which they say what they showed.

    `memory` is its file; `peers` are the sockets to the other ranks of the group. Both are taken
    over. `seconds`: how late a rank may be.
    """

    def __init__(self, rank: int, memory: int, peers: dict[int, socket.socket]) -> None:
        self._rank, self._peers = rank, peers
        self._turn, self.seconds = 0, _SECONDS
        size = len(peers) + 1
        whole = torch.frombuffer(mmap.mmap(memory, 2 * size * PIECE), dtype=torch.uint8)
        os.close(memory)
        self._slots = whole.view(2, size, PIECE)

    def sum(self, x: Tensor) -> None:
        """Put the ranks' sum in the place of the contiguous `x`.

        DistNetworkError if a rank is gone, or late; RuntimeError if one sums another size.
        """
        for piece in x.view(-1).split(PIECE // x.element_size()):
            self._turn += 1
            self._show(piece)
            self._add_up(piece)

    def _show(self, piece: Tensor) -> None:
        self._slot(self._rank, piece).copy_(piece)
        for rank, peer in self._peers.items():
            with _told(rank):
                peer.send(_SHOWN.pack(self._turn, piece.nbytes))

    def _add_up(self, piece: Tensor) -> None:
        for rank, peer in self._peers.items():
            peer.settimeout(self.seconds)
            with _told(rank, self.seconds):
                said = peer.recv(_SHOWN.size)
            if not said:
                raise dist.DistNetworkError(f"Connection closed by peer: {_who(rank)}")
            if said != (mine := _SHOWN.pack(self._turn, piece.nbytes)):
                raise RuntimeError(
                    "ranks sum different tensors: rank {} is at sum {} with {} bytes, rank {} at "
                    "sum {} with {} bytes".format(
                        rank, *_SHOWN.unpack(said), self._rank, *_SHOWN.unpack(mine)
                    )
                )
        if len(self._peers) == 1:
            [other] = self._peers
            piece.add_(self._slot(other, piece))  # either order gives the same bits
            return
        first, *rest = (self._slot(rank, piece) for rank in range(len(self._peers) + 1))
        piece.copy_(first)
        for slot in rest:
            piece.add_(slot)

    def _slot(self, rank: int, piece: Tensor) -> Tensor:
        return self._slots[self._turn % 2, rank, : piece.nbytes].view(piece.dtype)


def _who(rank: int) -> str:
    return f"rank {rank} of a shared sum"


@contextmanager
def _told(rank: int, seconds: float = 0.0) -> Iterator[None]:
    """What a socket to a rank raises, as who ends a rank knows it of other collectives."""
    try:
        yield
    except TimeoutError:
        raise dist.DistNetworkError(f"Timed out waiting {seconds:g} s for {_who(rank)}") from None
    except OSError:
        raise dist.DistNetworkError(f"Connection closed by peer: {_who(rank)}") from None


_known: WeakKeyDictionary[dist.ProcessGroup, SharedMemory | None] = WeakKeyDictionary()
_seconds: WeakKeyDictionary[dist.ProcessGroup, float] = WeakKeyDictionary()


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> bool:
    """Sum the contiguous `x` over the group, in place, as every rank of it does; gives whether.

    Not where shared memory does not serve: the tensor is small or not in the host's memory, or the
    group is none of gloo's on one host. A group's first large sum finds out, by collectives.
    """
    if x.device.type != "cpu" or x.nbytes < LEAST or type(group) is not dist.ProcessGroup:
        return False
    if group not in _known:
        _known[group] = _meet(group)
    memory = _known[group]
    if memory is None:
        return False
    memory.seconds = _seconds.get(group, memory.seconds)
    torch.ops.parallel3d.allreduce_(x, group.boxed())
    return True


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Let a group's sums fail after `seconds` from now on."""
    _seconds[group] = seconds


def _sum(x: Tensor, group: Any) -> None:
    memory = _known[dist.ProcessGroup.unbox(group)]
    assert memory is not None
    memory.sum(x)


# An operator, so that what counts communication by torch's dispatcher, and profilers, see it.
_library = torch.library.Library("parallel3d", "DEF")
_library.define("allreduce_(Tensor(a!) x, __torch__.torch.classes.c10d.ProcessGroup group) -> ()")
_library.impl("allreduce_", _sum, "CompositeExplicitAutograd")


def _meet(group: dist.ProcessGroup) -> SharedMemory | None:
    """Share memory among the group's ranks if every one of them can: the same answer on each."""
    rank, size, memory = group.rank(), group.size(), None
    if dist.get_backend(group) != "gloo" or size > _MOST_RANKS or not hasattr(os, "memfd_create"):
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.settimeout(_PATIENCE)
        mine = torch.tensor([secrets.randbits(62), _host()])
        if rank == 0:
            door.bind(_address(int(mine[0])))
            door.listen(size)
        everyone = mine.new_empty(2 * size)
        all_gather_single(everyone, mine, group=group)
        names, hosts = everyone.view(size, 2).t().tolist()
        if len({*hosts}) > 1:
            return None
        with suppress(OSError):
            memory = _invite(door, size) if rank == 0 else _visit(door, names[0], rank, size)
    can = torch.tensor([memory is not None], dtype=torch.int)
    dist.all_reduce(can, op=dist.ReduceOp.MIN, group=group)
    return memory if can.item() else None


def _host() -> int:
    """A number of what ranks must have in common: a machine that is up, a network, a user."""
    try:
        told = Path("/proc/sys/kernel/random/boot_id").read_text()
        told += f"{os.stat('/proc/self/ns/net').st_ino} {os.getuid()}"
    except OSError:
        told = secrets.token_hex()  # as nobody else's
    return int.from_bytes(hashlib.sha256(told.encode()).digest()[:7])


def _address(name: int) -> str:
    return f"\0parallel3d-{name:x}"  # of the network's namespace: no file


def _invite(door: socket.socket, size: int) -> SharedMemory:
    """Make the memory and a pair of sockets for every two ranks, and hand them out."""
    guests: dict[int, socket.socket] = {}
    while len(guests) < size - 1:
        guest, _ = door.accept()
        guest.settimeout(_PATIENCE)
        _, user, _ = struct.unpack(
            "3i", guest.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )
        if user == os.getuid():
            guests[guest.recv(1)[0]] = guest
    memory = os.memfd_create("parallel3d")
    os.ftruncate(memory, 2 * size * PIECE)
    ends: dict[tuple[int, int], socket.socket] = {}
    for a in range(size):
        for b in range(a + 1, size):
            ends[a, b], ends[b, a] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for rank, guest in guests.items():
        theirs = [ends.pop((rank, other)) for other in range(size) if other != rank]
        socket.send_fds(guest, [b"-"], [memory, *(end.fileno() for end in theirs)])
        for end in (guest, *theirs):
            end.close()
    return SharedMemory(0, memory, {other: end for (_, other), end in ends.items()})


def _visit(door: socket.socket, name: int, rank: int, size: int) -> SharedMemory:
    """Fetch this rank's share of what rank 0 hands out."""
    door.connect(_address(name))
    door.send(bytes([rank]))
    _, files, _, _ = socket.recv_fds(door, 1, size, socket.MSG_CMSG_CLOEXEC)
    if len(files) < size:
        raise ConnectionError("rank 0 has none to share")
    memory, *ends = files
    others = [other for other in range(size) if other != rank]
    peers = {other: socket.socket(fileno=end) for other, end in zip(others, ends, strict=True)}
    return SharedMemory(rank, memory, peers)
