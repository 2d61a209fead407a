"""Runs that go on from the memory of their hosts: `checkpoint.in_memory_every`.

Two hosts are two folders: ranks 0 and 1 have one, ranks 2 and 3 the other.
"""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.checkpoint import drill

pytestmark = [pytest.mark.drill, pytest.mark.usefixtures("cpu_adam")]

MESH = (2, 2, 1)
STEPS = 8


def two_hosts(memory, rank):
    """Let ranks 0 and 1 be on one host, 2 and 3 on another, each with a memory of its own."""
    from parallel3d.mesh.nodes import Nodes
    from parallel3d.train import memory as memories
    from parallel3d.train import start

    found, opened = start.find_nodes, memories.HostMemory

    def find(mesh):
        names = tuple("ab"[2 * r // mesh.world.size] for r in range(mesh.world.size))
        assert len(found(mesh).hosts) == len(names)
        return Nodes(names, names)

    def open_own(mesh, nodes, root, *args):
        own = memory / nodes.hosts[rank]
        own.mkdir(parents=True, exist_ok=True)
        return opened(mesh, nodes, own, *args)

    start.find_nodes, memories.HostMemory = find, open_own


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    root = tmp_path_factory.mktemp("memory")
    config = drill.prepared_config(root)
    config["parallel3d"]["train"]["steps"] = STEPS
    config["parallel3d"]["checkpoint"] |= {
        "every": 4, "in_memory_every": 1, "in_memory_folder": str(root)
    }  # fmt: skip
    return config


@pytest.fixture(scope="module")
def unbroken(config):
    run = drill.Run(config, "unbroken", MESH, parallel3d__checkpoint__in_memory_every=0)
    assert [end.code for end in run.start()] == [0] * 4
    return run


class MemoryRun(drill.Run):
    """A run on two hosts."""

    def __init__(self, config, name, root, mesh=MESH, **changes):
        super().__init__(config, name, mesh, **changes)
        self.memory = root / "hosts"

    def start(self, fault="", **options):
        return super().start(fault, partial(two_hosts, self.memory), **options)

    def killed(self, step, rank):
        """Kill a rank as the launch begins its `step`-th step."""
        ended = self.start(f"kill trainer.step {step} {rank}")
        drill.check_died(ended, rank)

    def steps(self, host):
        return {p.name: p for p in self.memory.glob(f"{host}/parallel3d-*/{self.name}-*/step-*")}

    def events(self, kind):
        lines = map(json.loads, (self.folder / "events.jsonl").read_text().splitlines())
        return [line for line in lines if line["event"] == kind]


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 16
    path.write_bytes(data)


def test_losses_of_memory(config, unbroken, tmp_path):
    run = MemoryRun(config, "lost", tmp_path, parallel3d__checkpoint__asynchronous=False)
    run.killed(4, 1)
    for host in "ab":
        assert {*run.steps(host)} == {"step-2", "step-3"}
        assert {p.name for p in run.steps(host)["step-3"].glob("*.safetensors")} == {
            f"shard-{rank:05d}-of-00004.safetensors" for rank in range(4)
        }
    shutil.rmtree(run.memory / "b")
    import time

    t = time.time()
    ended = run.start("kill trainer.step 3 2")
    drill.check_died(ended, 2)
    print(ended[0].log, time.time() - t)
    print((run.folder / "events.jsonl").read_text())
    flip(run.steps("a")["step-5"] / "shard-00001-of-00004.safetensors")
    t = time.time()
    ended = run.start("kill trainer.step 2 2")
    print(ended[0].log, time.time() - t)
    print((run.folder / "events.jsonl").read_text())
    drill.check_died(ended, 2)
    for host in "ab":
        flip(run.steps(host)["step-6"] / "shard-00001-of-00004.safetensors")
    ended = run.start()
    print(ended[0].log, time.time() - t)
    print((run.folder / "events.jsonl").read_text())
    drill.check_same(run, unbroken)
    print([*run.memory.rglob("*")])
