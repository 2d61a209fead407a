"""The mesh on real ranks: coordinates, groups, transfers, time-outs, and the place of a process."""

import os
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parallel3d.base.errors import ConfigError
from parallel3d.mesh.launch import Launch
from parallel3d.mesh.mesh import ROLES, Mesh, draw_mesh
from parallel3d.tensor.collectives import all_gather_sequence, reduce_scatter_sequence
from parallel3d.verify.local_ranks import RankFailed, run_locally
from tests.meshes import sizes_of

pytestmark = pytest.mark.gloo

VARIABLES = [
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
]


def places_on_rank(rank, sizes):
    places = []
    for size in sizes:
        mesh = Mesh(**sizes_of(size)._asdict())
        peers = {role: getattr(mesh, role) for role in ROLES}
        groups = {role: own.ranks for role, own in peers.items()}
        ends = mesh.join_pair(0, size[0] - 1)
        joined = None if ends is None else dist.get_process_group_ranks(ends)
        coords = mesh.coords, {role: own.coord for role, own in peers.items()}
        lengths = {role: own.size for role, own in peers.items()}
        # The sum over a group tells who is really in it.
        sums = {}
        for role, own in peers.items():
            total = torch.tensor([2.0**rank])
            dist.all_reduce(total, group=own.group)
            sums[role] = int(total)
        mesh.set_timeouts(50)
        timed = [*(own.group for own in peers.values()), *([] if ends is None else [ends])]
        timeouts = {g._get_backend(mesh.device).options._timeout.seconds for g in timed}
        settings = mesh.picture(), mesh.backend, timeouts
        places.append((groups, joined, coords, lengths, sums, settings))
        mesh.barrier()
    return places


def owners_on_rank(rank, cases):
    """The ranks of the roles that ep and dp_shards set, mesh by mesh."""
    owners = []
    for size, ep, shards in cases:
        mesh = Mesh(**sizes_of(size)._asdict(), ep=ep, dp_shards=shards)
        roles = ("experts", "expert_replicas", "whole_model", "model")
        roles += ("samples", "replicas", "shards", "copies", "expert_shards")
        mesh.set_timeouts(50)
        owners.append({role: mesh.peers(role).ranks for role in roles})
        mesh.barrier()
    return owners


# Meshes of 8 ranks, ranks that divide the experts, and ranks of a copy of the shards.
EXPERTS = [((2, 2, 2), 2, None), ((1, 8, 1), 2, 4), ((1, 4, 2, 1), 2, 2)]
MORE_EXPERTS = [
    ((1, 8, 1), 4, None),
    ((1, 2, 2, 2), 2, None),
    ((2, 4, 1), 4, None),
    ((1, 8, 1), 1, 4),
    ((2, 4, 1), 1, 2),
    ((2, 2, 2), 1, 1),
    ((1, 8, 1), 2, 8),
]


@pytest.mark.parametrize(
    "cases",
    [EXPERTS, pytest.param(MORE_EXPERTS, marks=pytest.mark.slow)],
    ids=["few", "more"],
)
def test_groups_of_ranks_that_divide_experts(cases):
    """Neighbours along dp own different experts; the others at the same place own the same ones."""
    ranks = run_locally(owners_on_rank, 8, cases)
    for number, (size, ep, shards) in enumerate(cases):
        pp, dp, cp, tp = sizes_of(size)
        shards = shards or dp
        grid = np.arange(8).reshape(pp, dp // shards, shards // ep, ep, cp, tp)
        for rank in range(8):
            p, copy, d, e, c, t = (int(i[0]) for i in np.where(grid == rank))
            assert ranks[rank][number] == {
                "experts": grid[p, copy, d, :, c, t].tolist(),
                "expert_replicas": grid[p, :, :, e, :, t].flatten().tolist(),
                "whole_model": grid[:, copy, d, :, c, :].flatten().tolist(),
                "model": grid[:, copy, d, e, c, :].flatten().tolist(),
                "samples": grid[p, :, :, :, c, t].flatten().tolist(),
                "replicas": grid[p, :, :, :, :, t].flatten().tolist(),
                "shards": grid[p, copy, :, :, :, t].flatten().tolist(),
                "copies": grid[p, :, d, e, c, t].tolist(),
                "expert_shards": grid[p, copy, :, e, :, t].flatten().tolist(),
            }


def disagree(rank):
    """Two hosts with different numbers of ranks take "node" for different numbers."""
    Mesh(dp=4, dp_shards=4 if rank else 2)


def test_hosts_that_disagree_about_the_copies_are_refused_by_all_ranks():
    with pytest.raises(RankFailed, match="hosts have different numbers of ranks, for 2 and 4 sh"):
        run_locally(disagree, 4, timeout=60)


@pytest.mark.parametrize(
    "sizes",
    [
        [(1, 1, 1)],
        pytest.param([(2, 1, 2), (1, 4, 1), (4, 1, 1)], marks=pytest.mark.slow),
        [(3, 2, 1), (1, 3, 2)],
        pytest.param([(2, 2, 2), (4, 1, 2), (1, 2, 4)], marks=pytest.mark.slow),
        pytest.param(
            [(1, 1, 4, 1), (1, 1, 2, 2), (2, 1, 2, 1), (1, 2, 2, 1)], marks=pytest.mark.slow
        ),
        [(2, 1, 2, 2)],
        pytest.param([(1, 2, 2, 2)], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_groups_and_coordinates_of_ranks(sizes):
    """tp is innermost and pp outermost: arange(ranks).reshape(pp, dp, cp, tp)."""
    world = int(np.prod(sizes[0]))
    results = run_locally(places_on_rank, world, sizes)
    for number, size in enumerate(sizes):
        grid = np.arange(world).reshape(sizes_of(size))
        for rank in range(world):
            groups, ends, coords, lengths, sums, settings = results[rank][number]
            p, d, c, t = (int(i[0]) for i in np.where(grid == rank))
            assert groups == {
                "pipeline": grid[:, d, c, t].tolist(),
                "samples": grid[p, :, c, t].tolist(),
                "context": grid[p, d, :, t].tolist(),
                **dict.fromkeys(
                    ("replicas", "shards", "expert_replicas", "expert_shards"),
                    grid[p, :, :, t].flatten().tolist(),
                ),
                "copies": [rank],
                "tensor": grid[p, d, c, :].tolist(),
                "experts": [rank],
                **dict.fromkeys(("model", "whole_model"), grid[:, d, c, :].flatten().tolist()),
                "world": list(range(world)),
                "alone": [rank],
            }
            place = {role: ranks.index(rank) for role, ranks in groups.items()}
            assert coords == ((p, d, c, t) if size[2:-1] > (1,) else (p, d, t), place)
            assert lengths == {role: len(ranks) for role, ranks in groups.items()}
            assert sums == {role: sum(2**r for r in ranks) for role, ranks in groups.items()}
            owners = sorted({int(grid[0, d, c, t]), int(grid[-1, d, c, t])})
            assert ends == (owners if p in (0, size[0] - 1) and len(owners) == 2 else None)
            assert settings == (draw_mesh(grid), "gloo", {50})


def transfers_on_rank(rank):
    """Each pp coordinate sends to both its neighbours; the tensors say who sent them, and when."""
    mesh = Mesh(pp=3, tp=2)
    me = mesh.pipeline.coord
    pp = mesh.pipeline.size
    sends = []
    receives = []
    for peer in {(me - 1) % pp, (me + 1) % pp}:
        for number in range(4):
            # Two channels: tags 0 and 2, whose messages overtake each other on the way in.
            message = torch.tensor([rank, mesh.tensor.coord, peer, number], dtype=torch.float32)
            sends.append((mesh.isend(message, peer, tag=2 * (number % 2)), message))
        for number in (1, 3, 0, 2):
            buffer = torch.empty(4)
            receives.append((mesh.irecv(buffer, peer, tag=2 * (number % 2)), peer, number, buffer))
    for transfer, peer, number, buffer in reversed(receives):
        transfer.wait()
        assert buffer.tolist() == [mesh.pipeline.ranks[peer], mesh.tensor.coord, me, number]
    for transfer, _ in sends:
        transfer.wait()
        assert transfer.is_completed()
    mesh.barrier()
    return len(receives)


def test_transfers_keep_their_order_on_each_channel():
    assert run_locally(transfers_on_rank, 6) == [8] * 6


WAITS = {
    "world": lambda mesh: mesh.barrier(),
    "pair": lambda mesh: dist.all_reduce(torch.ones(1), group=mesh.join_pair(0, 1)),
    "receive": lambda mesh: mesh.irecv(torch.empty(1), 1, 0).wait(),
    # More than the kernel's buffers take, so that it cannot leave by itself.
    "send": lambda mesh: mesh.isend(torch.empty(10**7), 1, 0).wait(),
}


def silent_peer(rank, waits, given_up):
    mesh = Mesh(pp=2)
    mesh.join_pair(0, 1)
    mesh.barrier()
    # Not before: the other one may be late by more than that on a busy machine.
    mesh.set_timeouts(0.2)
    if rank == 1:
        while not given_up.exists():
            time.sleep(0.02)
        return []
    waited = []
    for what in waits:
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="Timed out"):
            WAITS[what](mesh)
        waited.append(time.monotonic() - start)
    given_up.touch()
    return waited


# Once it has given up, a group fails at once ever after; torch makes "pp" the "world" here.
@pytest.mark.parametrize("waits", [["world", "pair"], ["receive"], ["send"]], ids=str)
def test_silent_peer_is_given_up(waits, tmp_path):
    """Without `set_timeouts` it would take half an hour."""
    waited, _ = run_locally(silent_peer, 2, waits, tmp_path / "given up", timeout=30)
    assert len(waited) == len(waits)
    assert all(0.15 < seconds < 20 for seconds in waited), waited


def helpers_on_rank(rank):
    os.environ.pop("OMP_NUM_THREADS", None)
    mesh = Mesh(dp=2, tp=2)
    # Ranks share the node's cores: OpenMP's threads would spin on each other's.
    assert torch.get_num_threads() == max(1, os.cpu_count() // 4)
    assert mesh.messages.gather_floats([rank, 0.1]) == [[float(r), 0.1] for r in range(4)]
    order = []
    for part in range(2):
        with mesh.one_at_a_time() as first:
            assert first == (rank == 0)
            order.append((time.monotonic(), part))
            time.sleep(0.1 if first else 0)
    mesh.close()
    assert not dist.is_initialized()
    mesh.close()  # once more does no harm
    return [t for t, _ in order]


def test_collective_helpers_and_a_clean_end():
    first, *others = run_locally(helpers_on_rank, 4)
    for other in others:
        assert all(a + 0.09 < b for a, b in zip(first, other, strict=True))


def without_launcher(rank, log):
    """What a mesh of one process is, and the threads that it leaves; what it says goes to a log."""
    for name in VARIABLES:
        os.environ.pop(name, None)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    mesh = Mesh()
    mesh.set_timeouts(5)
    mesh.barrier()
    sizes = {getattr(mesh, role).size for role in ROLES}
    rows = mesh.messages.gather_floats([3])
    mesh.close()
    threads = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sizes, rows, [name for name in threads if "gloo" in name]


def test_one_process_needs_no_launcher(tmp_path):
    log = tmp_path / "log.txt"
    assert run_locally(without_launcher, 1, log) == [({1}, [[3.0]], [])]
    assert log.read_text() == ""


@pytest.fixture
def environment(monkeypatch):
    """Sets the launcher's variables, and no others."""

    def set_variables(**variables):
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return set_variables


def test_mesh_of_another_number_of_ranks_is_refused(environment):
    environment(RANK=0, WORLD_SIZE=8, LOCAL_RANK=0)
    before = dist.is_initialized()
    with pytest.raises(ConfigError, match="mesh pp 2 × dp 3 × tp 1 = 6 ranks, but 8 processes"):
        Mesh(pp=2, dp=3)
    assert dist.is_initialized() == before  # nothing half-made stays behind


SRUN = {"SLURM_PROCID": 5, "SLURM_NTASKS": 8, "SLURM_LOCALID": 1}


def test_launch_is_read_from_the_variables_of_each_launcher(environment):
    environment()
    assert Launch.from_environment() == Launch(0, 1, 0)
    environment(RANK=3, WORLD_SIZE=4, LOCAL_RANK=1)
    assert Launch.from_environment() == Launch(3, 4, 1, 4)  # all on one node, for all we know
    environment(RANK=3, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2)
    assert Launch.from_environment() == Launch(3, 4, 1, 2)
    environment(RANK=3, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_SIZE=2)
    assert Launch.from_environment() == Launch(3, 4, 1, 2)
    environment(**SRUN, MASTER_ADDR="node0")
    assert Launch.from_environment() == Launch(5, 8, 1, 2)  # at least, for all it says
    # torchrun inside an allocation: its word counts.
    environment(**SRUN, RANK=0, WORLD_SIZE=2, LOCAL_RANK=0, MASTER_ADDR="node0")
    assert Launch.from_environment() == Launch(0, 2, 0, 2)
    # A batch script's shell, or a single task: one process.
    environment(SLURM_PROCID=0, SLURM_NTASKS=1, SLURM_LOCALID=0)
    assert Launch.from_environment() == Launch(0, 1, 0)
    environment(**SRUN)
    with pytest.raises(ConfigError, match=r"export MASTER_ADDR=\$\(scontrol"):
        Launch.from_environment()


PICTURE = """\
mesh pp 2 × dp 2 × tp 2 = 8 ranks
        pp 0    pp 1
  dp 0  [0 1] → [4 5]
  dp 1  [2 3] → [6 7]
  → pp cuts the layers   rows: dp cuts the batch   [ ] tp cuts the matrices"""


def grid_of(*sizes):
    return np.arange(np.prod(sizes)).reshape(sizes_of(sizes))


def test_picture_of_a_mesh():
    assert draw_mesh(grid_of(2, 2, 2)) == PICTURE
    assert draw_mesh(grid_of(1, 1, 4, 2)).splitlines()[2:] == [
        "  dp 0  [0 1] .. [6 7]",
        "  cells: cp cuts the tokens   [ ] tp cuts the matrices",
    ]
    assert (
        draw_mesh(grid_of(1, 1, 1)) == "mesh pp 1 × dp 1 × tp 1 = 1 rank\n        pp 0\n  dp 0  [0]"
    )


def test_picture_of_a_large_mesh_stays_small():
    lines = draw_mesh(grid_of(4, 64, 8)).splitlines()
    assert len(lines) == 2 + 8 + 1
    assert lines[-2] == "  dp 63  [504..511] → [1016..1023] → [1528..1535] → [2040..2047]"
    assert max(map(len, lines)) <= 100


def gathered_and_scattered_on_rank(rank, samples):
    mesh = Mesh(tp=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        part = torch.full((samples, 2, 3), 1.0 + rank)
        whole = all_gather_sequence(part, mesh.tensor.group)
        again = reduce_scatter_sequence(whole, mesh.tensor.group)
        rows = mesh.messages.gather_floats([float(rank)])
    mesh.close()
    return whole[:, :, 0].tolist(), (again - 2 * part).abs().max().item(), rows


@pytest.mark.parametrize("samples", [1, 2])
def test_torch_does_not_warn_of_an_older_name(samples):
    """Several samples' collectives are one call of torch, which knows them by these names."""
    for gathered in run_locally(gathered_and_scattered_on_rank, 2, samples):
        assert gathered == ([[1.0, 1.0, 2.0, 2.0]] * samples, 0.0, [[0.0], [1.0]])
