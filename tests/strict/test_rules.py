"""The rules of the strict backend, each broken once: all ranks end, and hear who met what."""

import os
import random
import re
import signal
import time
from datetime import timedelta
from math import prod

import pytest
import torch
import torch.distributed as dist

from parallel3d.base.errors import ConfigError
from parallel3d.mesh.groups import choose_backend, split
from parallel3d.mesh.join import STARTUP_TIMEOUT
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.transfer import all_gather_single
from tests.meshes import sizes_of
from tests.strict import StrictError, StrictOptions
from tests.strict.running import STRICT, run_strictly

pytestmark = pytest.mark.gloo

LIMIT = 1.0  # seconds for an operation, where that is what ends the ranks
LATE_SENDS = "send=0.3"  # a busy machine, too, changes the buffer before


def all_reduce(mesh, role, size=4, **options):
    return dist.all_reduce(torch.ones(size), group=getattr(mesh, role).group, **options)


def missing_wait(mesh):
    if mesh.pipeline.coord == 0:
        mesh.isend(torch.ones(4), 1, 0).wait()
    else:
        mesh.irecv(torch.empty(4), 0, 0)


def reused_buffer(mesh):
    buffer = torch.ones(4)
    if mesh.pipeline.coord == 0:
        sent = mesh.isend(buffer, 1, 0)
        buffer.mul_(2)
        sent.wait()
    else:
        mesh.irecv(buffer, 0, 0).wait()


def swapped_order(mesh):
    if mesh.pipeline.coord == 0:
        works = [mesh.isend(torch.ones(4), 1, tag) for tag in (0, 1)]
    else:
        works = [mesh.irecv(torch.empty(4), 0, tag) for tag in (1, 0)]
    for work in works:
        work.wait()


def wrong_group(mesh):
    all_reduce(mesh, "replicas" if mesh.rank == 0 else "tensor")


def wrong_size(mesh):
    all_reduce(mesh, "tensor", 4 + mesh.tensor.coord)


def wrong_type(mesh):
    dist.all_reduce(torch.ones(4, dtype=torch.int64 if mesh.rank else torch.float32))


def wrong_kind(mesh):
    if mesh.rank:
        all_gather_single(torch.empty(8), torch.ones(4))
    else:
        all_reduce(mesh, "world")


def world_inside_a_stage(mesh):
    if mesh.pipeline.coord == 0:
        all_reduce(mesh, "world")
        mesh.isend(torch.ones(4), 1, 0).wait()
    else:
        mesh.irecv(torch.empty(4), 0, 0).wait()


def written_result(mesh):
    buffer = torch.ones(4)
    work = dist.all_reduce(buffer, async_op=True)
    buffer.zero_()
    work.wait()


def pending_at_the_end(mesh):
    work = all_reduce(mesh, "world", async_op=True)
    mesh.close()
    return work


def silent_peer(mesh):
    if mesh.rank == 0:
        all_reduce(mesh, "world")


def split_without_a_rank(mesh):
    if mesh.rank == 0:
        dist.group.WORLD.split_among([[0], [1]], timedelta(minutes=10), "halves")


# The fault, the mesh on which it is planted, and the message that names it.
FAULTS = [
    (missing_wait, (2, 1, 1), r"rank 1: receive of 4 float32, tag 0 on .*: nobody waited"),
    (reused_buffer, (2, 1, 1), r"rank 0: send of 4 float32, tag 0 on .*: the buffer changed"),
    (
        swapped_order,
        (2, 1, 1),
        r"rank 0: send of 4 float32, tag 0 on .* rank 1 with receive of 4 float32, tag 1"
        r"|rank 1: receive of 4 float32, tag 1 on .* rank 0 with send of 4 float32, tag 0",
    ),
    (
        wrong_group,
        (1, 2, 2),
        r"was not over within 1 s; .*rank 0 was in all_reduce 1 of 4 float32, sum on dp "
        r"\(ranks 0, 2\), rank 1 was in all_reduce 1 of 4 float32, sum on tp \(ranks 0, 1\), ",
    ),
    (
        wrong_size,
        (1, 1, 2),
        r"rank (0: all_reduce .* of 4 .* rank 1 with all_reduce \d+ of 5 float32, sum"
        r"|1: all_reduce .* of 5 .* rank 0 with all_reduce \d+ of 4 float32, sum)",
    ),
    (wrong_type, (1, 2, 1), r"of 4 (float32|int64), sum on .* met rank \d with all_reduce .* of 4"),
    (
        wrong_kind,
        (1, 2, 1),
        r"rank 0: all_reduce .* met rank 1 with all_gather"
        r"|rank 1: all_gather .* met rank 0 with all_reduce",
    ),
    (
        world_inside_a_stage,
        (2, 1, 2),
        r"rank 0 was in all_reduce \d+ of 4 float32, sum on default_pg \(ranks 0, 1, 2, 3\), .*"
        r"rank 2 was in receive of 4 float32, tag 0 on pp \(ranks 0, 2\)",
    ),
    (written_result, (1, 2, 1), r": its result's buffer was written before `wait`"),
    (pending_at_the_end, (1, 2, 1), r"all_reduce .*: it was pending as the group was destroyed"),
    (silent_peer, (1, 2, 1), r"was not over within 1 s; .* rank 1 was in no communication"),
    (split_without_a_rank, (1, 2, 1), r"rank 0: split_group \d+ of halves into 2 .* was not over"),
]
# Nobody comes with anything else: the ranks wait for each other until the time is over.
TIMED = {wrong_group, world_inside_a_stage, silent_peer, split_without_a_rank}


def fault_on_rank(rank, number):
    plant, sizes, _ = FAULTS[number]
    mesh = Mesh(**sizes_of(sizes)._asdict())
    mesh.barrier()
    mesh.set_timeouts(LIMIT if plant in TIMED else 60)
    start = time.monotonic()
    try:
        plant(mesh)
        for _ in range(200):  # a rank without a fault hears of the others' when it communicates
            time.sleep(0.05)
            all_reduce(mesh, "alone")
    except StrictError as error:
        return str(error), time.monotonic() - start
    return "nothing", 0.0


# Six faults stand for a rule each; the others are seen in the same ways.
SIX = {missing_wait, reused_buffer, swapped_order, wrong_group, wrong_size, world_inside_a_stage}


def numbered_faults():
    for number, (plant, _, _) in enumerate(FAULTS):
        marks = () if plant in SIX else (pytest.mark.slow,)
        yield pytest.param(number, id=plant.__name__, marks=marks)


@pytest.mark.parametrize("number", list(numbered_faults()))
def test_broken_rule_is_named_on_every_rank(number):
    _, sizes, pattern = FAULTS[number]
    reports = run_strictly(fault_on_rank, prod(sizes), number, text=LATE_SENDS, timeout=30)
    messages = {text for text, _ in reports}
    assert len(messages) == 1, messages
    assert re.search(pattern, messages.pop()), reports
    assert all(seconds < 15 for _, seconds in reports), reports


def timeouts_on_rank(rank):
    """The seconds that groups give their operations, and what a killed peer's waits for."""
    mesh = Mesh(pp=2)
    ends = mesh.join_pair(0, 1)
    groups = [mesh.pipeline.group, mesh.replicas.group, mesh.world.group, mesh._backward, ends]
    halves = dist.group.WORLD.split_among([[1], [0]], timedelta(minutes=10), "halves")
    outside = split([[1]], "one", timedelta(seconds=7))
    return [
        *(group.queue.seconds for group in groups),
        halves.queue.seconds,
        None if outside is None else outside.queue.seconds,
    ]


def test_groups_have_the_timeout_of_the_start_unless_one_is_given():
    """NCCL's watchdog gave the axes 10 minutes, and the world 30."""
    start = [STARTUP_TIMEOUT.total_seconds()] * 5
    assert run_strictly(timeouts_on_rank, 2) == [[*start, 600, None], [*start, 600, 7]]


def killed_peer(rank, victim):
    """The seconds for which a rank waits for one that is gone, and what it hears."""
    if rank == victim and os.fork():
        os.wait()  # the child is the rank
        return None
    mesh = Mesh(pp=2)
    mesh.set_timeouts(LIMIT)
    mesh.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    start = time.monotonic()
    with pytest.raises(StrictError, match="was not over within"):
        mesh.irecv(torch.empty(1), victim, 0).wait()
    return time.monotonic() - start


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_peer_is_noticed_only_after_the_timeout(victim):
    """gloo says so at once; NCCL's kernels spin. With rank 0 the store is gone, too."""
    waited = run_strictly(killed_peer, 2, victim, timeout=30)[1 - victim]
    assert LIMIT - 0.1 < waited < 15


def freed_on_rank(rank, is_freed):
    """Count NaNs if rank 0 frees what it gathers, sends or sums before the operation is over."""
    mesh = Mesh(dp=2)
    frees = is_freed and rank == 0
    tensor = torch.ones(4)
    other = torch.ones(4)
    gathered = torch.empty(8)
    received = torch.empty(4)
    group = mesh.replicas.group
    works = [all_gather_single(gathered, tensor, group=group, async_op=True)]
    if frees:
        tensor.data = torch.zeros(4)
    del tensor  # the handle keeps it
    works.append(
        dist.irecv(received, group=group, group_src=0)
        if rank
        else dist.isend(other, group=group, group_dst=1)
    )
    if frees:
        del other
    summed = torch.ones(4)
    works.append(dist.all_reduce(summed, group=group, async_op=True))
    if frees:
        summed.data = torch.zeros(4)
    for work in works:
        work.wait()
    return [int(t.isnan().sum()) for t in (gathered, *([received] if rank else []), summed)]


def test_memory_freed_during_an_operation_becomes_nan():
    slow = "all_gather=0.3,send=0.3,all_reduce=0.3"  # the memory is freed before it is read
    assert run_strictly(freed_on_rank, 2, False, text=slow) == [[0, 0], [0, 0, 0]]
    assert run_strictly(freed_on_rank, 2, True, text=slow) == [[8, 0], [4, 4, 4]]


DELAYS = StrictOptions(delay=0.25, seed=3, chosen={"send": 2.0, "all_reduce@1": 1.0})


def test_delays_are_set_or_drawn_by_a_seed():
    assert StrictOptions.from_text("delay=0.25,seed=3,send=2,all_reduce@1=1") == DELAYS
    assert DELAYS.seconds("send", 0, random.Random()) == 2
    assert DELAYS.seconds("all_reduce", 1, random.Random()) == 1
    drawn = [DELAYS.seconds("all_reduce", 0, random.Random(5)) for _ in range(2)]
    assert drawn[0] == drawn[1] and 0 <= drawn[0] <= 0.25


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (f"{STRICT},delay", "no settings"),
        (f"{STRICT},delay=-1", "no settings"),
        (f"{STRICT},send=soon", "no settings"),
    ],
)
def test_unknown_backend_is_refused(monkeypatch, text, rule):
    monkeypatch.setenv("PARALLEL3D_BACKEND", text)
    with pytest.raises(ConfigError, match=f"PARALLEL3D_BACKEND.*{rule}"):
        choose_backend(torch.device("cpu"))


def test_ranks_on_one_device_may_use_the_strict_backend(monkeypatch):
    """NCCL would refuse them; their tensors go through the host."""
    registered = {}
    monkeypatch.setattr(
        dist.Backend,
        "register_backend",
        lambda name, create, **options: registered.update({name: options["devices"]}),
    )
    monkeypatch.setenv("PARALLEL3D_BACKEND", STRICT)
    assert choose_backend(torch.device("cuda", 0)) == "strict"
    assert registered == {"strict": ["cpu", "cuda"]}
