"""Sums through shared memory: gloo's numbers, and its errors when a rank is gone or late."""

import os

import pytest
import torch
import torch.distributed as dist

from parallel3d.config import RunConfig
from parallel3d.mesh import shared_memory
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.shared_memory import LEAST, PIECE
from parallel3d.mesh.traffic import Traffic
from parallel3d.tensor.collectives import all_reduce, start_all_reduce
from parallel3d.verify.local_ranks import run_locally
from parallel3d.verify.measure import TOLERANCE, errors_of, train_and_compare
from parallel3d.verify.reference import train_reference
from parallel3d.verify.shrink import shrink
from tests.verify.configs import config_of

pytestmark = pytest.mark.gloo


def drawn(rank, count, dtype):
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


def sums(rank, size):
    """Each beside the plain one; on two meshes, one by one."""
    for _ in range(2):
        mesh = Mesh(1, 1, size)
        group = mesh.group("tp")
        for count in (LEAST, 5 * PIECE // 4 + 3):  # a piece, and several with a shorter last one
            for dtype in (torch.float32, torch.bfloat16):
                mine = drawn(rank, count, dtype)
                everyone = [drawn(r, count, dtype) for r in range(size)]
                want = sum(everyone[1:], everyone[0])
                assert torch.equal(all_reduce(mine, group), want)
                assert torch.equal(mine, everyone[rank])
                if size == 2:  # where gloo has no other order to add in
                    dist.all_reduce(mine, group=group)
                    assert torch.equal(mine, want)
        pending = start_all_reduce(torch.ones(LEAST), group)
        assert pending.work is None and pending.wait()[0] == size
        small = start_all_reduce(torch.ones(LEAST // 4 - 1), group)
        assert small.work is not None and small.wait()[0] == size
        mesh.close()


# Three ranks, too: with two, the order of adding does not show.
@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_the_plain_ones_to_the_bit(size):
    run_locally(sums, size, size)


def trained(rank, config, reference):
    shared_memory.LEAST = 0  # else those of a small model are gloo's
    found = train_and_compare(rank, config, reference)
    assert None not in shared_memory._known.values() and shared_memory._known
    return found


@pytest.mark.parametrize(
    "mesh", [(2, 1, 2), *(pytest.param(m, marks=pytest.mark.slow) for m in [(1, 1, 4), (1, 2, 2)])]
)
def test_training_is_that_of_one_process(mesh, tmp_path):
    pp, dp, tp = mesh
    config = RunConfig.from_dict(config_of(zero=1, microbatches=3))
    small = shrink(config, ((pp, 1, 1), mesh), batch=24)
    reference = train_reference(small[pp, 1, 1], tmp_path)
    ranks = run_locally(trained, pp * dp * tp, small[mesh], reference)
    assert errors_of(small[mesh], ranks).within(TOLERANCE["fp32"])


def counted(rank):
    mesh = Mesh(1, 1, 2)
    group, x = mesh.group("tp"), torch.ones(LEAST)
    start_all_reduce(x, group).wait()
    with Traffic(mesh) as traffic:
        start_all_reduce(x, group).wait()
    return [(c.operation, c.group, c.calls, c.bytes) for c in traffic.calls]


def test_they_are_counted_as_traffic():
    assert run_locally(counted, 2) == [[("all_reduce", "tp=world", 1, 4 * LEAST)]] * 2


def stays_with_gloo(rank, why):
    if why == "another host":
        shared_memory._host = lambda: rank
    elif why == "no memory":
        os.memfd_create = refused
    mesh = Mesh(1, 1, 2)
    pending = start_all_reduce(torch.ones(LEAST), mesh.group("tp"))
    assert pending.work is not None and pending.wait()[0] == 2


def refused(*_):
    raise OSError("no")


@pytest.mark.parametrize("why", ["another host", "no memory"])
def test_it_stays_with_gloo(why):
    run_locally(stays_with_gloo, 2, why)


def fails(rank, how):
    mesh = Mesh(1, 1, 2)
    group = mesh.group("tp")
    start_all_reduce(torch.ones(LEAST), group).wait()
    mesh.set_timeouts(1 if how == "late" else 60)
    if rank == 1:
        if how == "gone":
            shared_memory._known.clear()  # as the end of a process closes its sockets
        if how != "other bytes":
            return None  # a process that lives on until its peer has said how it went
    count = LEAST + (rank if how == "other bytes" else 0)
    with pytest.raises(RuntimeError) as caught:
        start_all_reduce(torch.ones(count), group).wait()
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("gone", "Connection closed by peer: rank 1 of a shared sum"),
        ("late", "Timed out waiting 1 s for rank 1 of a shared sum"),
        (
            "other bytes",
            f"ranks sum different tensors: rank 1 is at sum 2 with {4 * LEAST + 4} bytes, "
            f"rank 0 at sum 2 with {4 * LEAST} bytes",
        ),
    ],
)
def test_an_error_says_who(how, says):
    assert run_locally(fails, 2, how)[0] == says
