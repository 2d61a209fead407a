"""The last words of a launch: rank 0's, and nothing of torch's after them."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from parallel3d.base.errors import ConfigError
from parallel3d.mesh import join
from parallel3d.mesh.launch import Launch
from parallel3d.mesh.mesh import Mesh
from parallel3d.verify.local_ranks import run_locally
from tests.mesh.mortal import mortal
from tests.meshes import sizes_of

pytestmark = pytest.mark.gloo


def last_words(rank, folder):
    log = os.open(folder / f"{rank}.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 2)  # torch writes there from C++
    if rank == 1:
        meet = join.meet

        def slow(*args):  # a rank on a busy machine
            store = meet(*args)
            time.sleep(0.3)
            return store

        join.meet = slow
    launch = Launch.from_environment()
    join.rank_0_first(launch, lambda: os.write(2, b"no such key\n"), ConfigError("no such key"))


def test_rank_0_keeps_the_store_until_others_have_read_its_end(tmp_path):
    run_locally(mortal, 2, last_words, tmp_path)
    assert (tmp_path / "0.txt").read_text() == "no such key\n"
    assert (tmp_path / "1.txt").read_text() == ""


def sums_on_rank(rank, sizes):
    """The sum over each mesh's longest axis; at each a rank comes first that was last before."""
    sums = []
    for turn, size in enumerate(sizes):
        if rank == turn % 2:
            time.sleep(0.1)
        mesh = Mesh(**sizes_of(size)._asdict())
        total = torch.tensor([1.0 + rank])
        dist.all_reduce(total, group=(mesh.pipeline if size[0] == 2 else mesh.tensor).group)
        sums.append(total.item())
        mesh.close()
    return sums


def test_ranks_can_join_again():
    """What the first group left in the store is not taken for the second's."""
    meshes = [(2, 1, 1), (1, 1, 2), (2, 1, 1)]
    assert run_locally(sums_on_rank, 2, meshes, timeout=20) == [[3.0] * 3] * 2
