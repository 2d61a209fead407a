"""The groups that a mesh makes: how many rounds over the world, and with what under NCCL.

One process; torch's fake group stands for the other ranks.
"""

import os
from collections import Counter
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel3d.mesh import groups, join
from parallel3d.mesh.launch import Launch
from parallel3d.mesh.mesh import ROLES, Mesh
from tests.meshes import sizes_of

pytestmark = pytest.mark.gloo

WORLD = 1024
SIZES = (8, 16, 8)
PP, DP, TP = SIZES
START = timedelta(minutes=30)


@pytest.fixture(autouse=True)
def nothing_joined():
    """A test before may have left its mesh of one."""
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def world():
    """1,024 ranks, of which this process is one."""
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=WORLD)
    yield
    dist.destroy_process_group()


@pytest.fixture
def calls(world, monkeypatch):
    """Every call that makes groups (name, positional, named), and what replaces such a call."""
    made = []

    def spy(name, make):
        def call(*args, **options):
            made.append((name, args, options))
            return make(*args, **options)

        monkeypatch.setattr(dist, name, call)

    spy("new_group", dist.new_group)
    yield made, spy


def test_number_of_groups_of_a_rank_does_not_grow_with_the_world(calls):
    """Where a backend cannot split, it also calls `new_group` for those of others.

    That is a few numbers of its own for each: O(ranks) of them, and nothing is sent.
    """
    made, _ = calls
    mesh = Mesh(**sizes_of(SIZES)._asdict(), launch=Launch(5, WORLD, 5, 8))
    mesh.join_pair(0, PP - 1)
    joined = [*{getattr(mesh, role).group for role in ROLES}, mesh._backward]
    joined += [mesh.join_pair(0, PP - 1), mesh.messages.aside]
    assert len({id(group) for group in joined}) == 9  # each rank's, at any size
    assert len(dist.distributed_c10d._world.pg_names) == 9
    # Two pipes, a dp and a tp group, the ends; a copy of the model; this rank, and what is aside.
    assert len(made) == 3 * DP * TP + PP * TP + PP * DP + DP + 2


class Options(SimpleNamespace):
    """What a group of NCCL's is made with."""


@pytest.fixture
def nccl(calls, monkeypatch):
    """The world's group as NCCL's, connected from the start: groups are split off it."""
    made, spy = calls
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    stand_in = SimpleNamespace(group_name="split", size=lambda: 1, rank=lambda: 0)
    spy("split_group", lambda *_, **__: stand_in)
    spy("new_group", lambda *_, **__: stand_in)
    monkeypatch.setattr(type(dist.group.WORLD), "bound_device_id", torch.device("cuda", 0))
    return made


def test_nccl_splits_an_axis_in_one_collective(nccl):
    """Not in one for each group: with a tied weight's owners there were 133."""
    mesh = Mesh(**sizes_of(SIZES)._asdict(), launch=Launch(5, WORLD, 5, 8))
    mesh.join_pair(0, PP - 1)
    mesh.join_pair(PP - 1, 0)
    assert Counter(name for name, _, _ in nccl) == {"split_group": 7, "new_group": 1}
    splits = {options["group_desc"]: (args, options) for name, args, options in nccl[:-2]}
    splits["ends"] = nccl[-1][1:]
    assert list(splits) == ["self", "pp", "dp", "tp", "model", "pp backward", "ends"]
    grid = torch.arange(WORLD).view(SIZES)
    for desc, ((parent, ranks), options) in splits.items():
        assert parent is dist.group.WORLD
        everyone = sorted(rank for members in ranks for rank in members)
        expected = grid[[0, -1]] if desc == "ends" else grid
        assert everyone == sorted(expected.flatten().tolist())
        # Without one of its own torch gives a group that is split off 10 minutes.
        assert options["timeout"] == options["pg_options"]._timeout == START
        urgent = desc in ("pp", "pp backward", "dp", "tp")  # others wait for these
        assert options["pg_options"].is_high_priority_stream == urgent
    assert splits["pp"][0][1] == splits["pp backward"][0][1] == grid.flatten(1).t().tolist()
    assert splits["ends"][0][1] == grid[[0, -1]].flatten(1).t().tolist()


def test_world_of_nccl_has_the_priority_of_an_axis_of_all_ranks(monkeypatch):
    """And torch's warning that transfers are serialised is not printed by every rank."""
    given = {}
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **options: given.update(options))
    monkeypatch.setattr(join, "meet", lambda launch, patience: dist.HashStore())
    monkeypatch.setattr(join, "choose_backend", lambda device: "nccl")
    join.join(Launch(0, 2, 0, 2), torch.device("cuda", 0))
    assert given["device_id"] == torch.device("cuda", 0)
    assert given["timeout"] == given["pg_options"]._timeout == START
    assert given["pg_options"].is_high_priority_stream


def test_environment_of_the_user_takes_precedence(monkeypatch):
    name = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
    monkeypatch.delenv(name, raising=False)
    assert groups.choose_backend(torch.device("cpu")) == "gloo"
    assert os.environ[name] == "false"
    monkeypatch.setenv(name, "true")
    groups.choose_backend(torch.device("cpu"))
    assert os.environ[name] == "true"
