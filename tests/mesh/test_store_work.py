"""What a rank of 1,024 asks of the store until its groups are made: counted, at two sizes.

One process; torch's fake group stands for the other ranks, and a store that counts for theirs. What
gloo itself asks as it connects is counted on real ranks, in test_network.py.
"""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers "fake"

from parallel3d.mesh import join
from parallel3d.mesh.launch import Launch
from parallel3d.mesh.mesh import Mesh
from tests.meshes import sizes_of

pytestmark = pytest.mark.gloo


class Counted(dist.Store):
    """A store that has what the other ranks would have put there, and counts each operation."""

    def __init__(self, held):
        super().__init__()
        self.held = dict(held)
        self.asked = Counter()

    def set(self, key, value):
        self.asked["set"] += 1
        self.held[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key):
        self.asked["get"] += 1
        return self.held[key]

    def add(self, key, amount):
        self.asked["add"] += 1
        self.held[key] = str(int(self.held.get(key, b"0")) + amount).encode()
        return int(self.held[key])

    def check(self, keys):
        self.asked["check"] += len(keys)
        return all(key in self.held for key in keys)

    def wait(self, keys, *_):
        self.asked["wait"] += len(keys)
        assert self.check(keys)


@pytest.fixture(autouse=True)
def alone():
    if dist.is_initialized():
        dist.destroy_process_group()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize("sizes", [(2, 4, 2), (8, 16, 8)], ids=str)
def test_number_of_store_operations_does_not_grow_with_the_world(sizes, rank, monkeypatch):
    """With a sentry, on several nodes, a tied weight's owners: the same at 16 and 1,024."""
    world = sizes[0] * sizes[1] * sizes[2]
    store = Counted(
        {join._START: b"", "arbiter": b"[]", "ranks that know their interface": b"%d" % world}
    )
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)  # `meet` sets them, too
    monkeypatch.setattr(join, "meet", lambda launch, patience: store)
    monkeypatch.setattr(join, "choose_backend", lambda device: "fake")

    def begin(rank, size, address, names, publish, fetch):
        publish("[]") if rank == 0 else fetch()

    monkeypatch.setattr(join.pulse, "begin", begin)
    launch = Launch(rank, world, rank % 8, 8)
    join.join(launch, torch.device("cpu"), watched=True)
    mesh = Mesh(**sizes_of(sizes)._asdict(), launch=launch)
    mesh.join_pair(0, sizes[0] - 1)
    # Rank 0's start, the arbiter's address; on several nodes also the ranks with an interface.
    first = "set" if rank == 0 else "get"
    assert store.asked == {first: 2, "add": 2, "check": 1}
