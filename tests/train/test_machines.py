"""Runs on several machines, which are made of one: who prepares, what is refused, what is said."""

import os
import time
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch.distributed as dist
from rich.console import Console

from parallel3d.base.errors import ConfigError, DataError, TrainingError
from parallel3d.base.lock import Lock
from parallel3d.config import RunConfig
from parallel3d.mesh import nodes
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.nodes import Nodes
from parallel3d.train import machines, open_corpus
from parallel3d.verify.local_ranks import run_locally
from tests.checkpoint.drill import prepared_config

pytestmark = pytest.mark.gloo


def test_nodes_by_what_the_machines_say():
    cyclic = Nodes(("a", "b") * 4, ("a 1", "b 2") * 4)
    assert [cyclic.first(rank) for rank in range(8)] == [0, 1] * 4
    assert cyclic.torn(2) == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    uneven = Nodes(("a",) * 3 + ("b",) * 5, ("a 1",) * 3 + ("b 2",) * 5)
    assert uneven.torn(1) == [] and uneven.torn(2) == [range(2, 4)]
    assert uneven.in_words(range(4)) == "ranks 0, 1, 2 on a and 3 on b"


def deal_cyclically(rank):
    """Two nodes of two ranks each, dealt out in turn (`srun --distribution=cyclic`)."""
    os.environ |= {"LOCAL_RANK": str(rank // 2), "LOCAL_WORLD_SIZE": "2"}

    def machine():
        return f"machine {rank % 2}"

    nodes.machine_of_this_process = machine
    nodes.socket = SimpleNamespace(gethostname=lambda: f"node{rank % 2}")


def on_two_nodes(rank, raw, root):
    deal_cyclically(rank)
    mesh = Mesh(dp=2, tp=2)
    config = RunConfig.from_dict(raw).resolve(4)
    warnings = []
    prepared = []
    prepare = open_corpus.prepare

    def noted(*args):
        prepared.append(rank)
        return prepare(*args)

    open_corpus.prepare = noted
    nodes_of_ranks = nodes.find_nodes(mesh)
    machines.check_machine(config, mesh, nodes_of_ranks, warnings.append)
    quiet = Console(quiet=True)
    corpus = open_corpus.open_corpus(config, mesh, nodes_of_ranks, quiet)

    patch.object(machines, "wait_until", lambda look: look()).start()  # none comes late
    refused = {}
    for name, shared in (("shared", True), ("apart", False)):
        place = root / name / ("" if shared else f"node{rank % 2}")
        place.mkdir(parents=True, exist_ok=True)
        os.chdir(place)
        lock = Lock(place / "runs" / "mine.lock")
        lock.path.parent.mkdir(exist_ok=True)
        if rank == 0:
            lock.take()
        folder = machines.Path("runs/mine")
        try:
            machines.refuse_unshared(folder, "runs", mesh, nodes_of_ranks)
        except ConfigError as error:
            refused[name] = str(error)
        mesh.barrier()
        lock.release()

    def other_on_the_second(data, progress):
        seed = {"held_out_seed": nodes.machine_of_this_process() == "machine 1"}
        return prepare(data.model_copy(update=seed), progress)

    open_corpus.prepare = other_on_the_second
    different = ""
    try:
        open_corpus.open_corpus(config, mesh, nodes_of_ranks, quiet)
    except DataError as error:
        different = str(error)

    # Last, as it leaves the group broken.
    def prepare_late(*args):
        return time.sleep(1) if rank == 0 else prepare(*args)

    def check_nothing(*args):
        return None

    open_corpus.prepare = prepare_late
    open_corpus.check_length = check_nothing
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.3), mesh.messages.aside)
    late = ""
    try:
        open_corpus.open_corpus(config, mesh, nodes_of_ranks, quiet)
    except TrainingError as error:
        late = str(error)
    except Exception:
        late = ""  # another one's patience ended first, and this one finds that it has gone
    return warnings, prepared, len(corpus.train), refused, different, late


def test_two_nodes_whose_ranks_are_dealt_out_in_turn(tmp_path):
    raw = prepared_config(tmp_path)
    results = run_locally(on_two_nodes, 4, raw, tmp_path)
    for rank, (warnings, prepared, tokens, refused, different, late) in enumerate(results):
        assert prepared == ([rank] if rank < 2 else [])  # once a machine, by its first rank
        assert tokens == results[0][2] > 0
        assert different.startswith("the corpus is not the same on node0 and node1: "), different
        (text,) = warnings
        assert "tp = 2 SPANS HOSTS: ranks 0 on node0 and 1 on node1, and 1 more groups" in text
        assert list(refused) == ["apart"]
        assert 'run.directory = "runs"' in refused["apart"]
        assert f"{tmp_path}/apart/node1/runs on node1 (rank 1) is not" in refused["apart"]
        assert "rank 0 on node0 writes to" in refused["apart"]
        if late:
            assert f"rank {rank} on node{rank % 2} has waited for 0:30:00" in late
            assert "parallel3d prepare" in late
    # The one that is late has nothing to wait for.
    assert any(late for *_, late in results) and not results[0][-1]
