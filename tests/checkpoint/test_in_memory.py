"""Runs that go on from the memory of their hosts: `checkpoint.in_memory_every`.

Two hosts are two folders: ranks 0 and 1 have one, ranks 2 and 3 the other.
"""

import json
import shutil
from functools import partial

import pytest

from tests.checkpoint import drill

pytestmark = [pytest.mark.drill, pytest.mark.usefixtures("cpu_adam")]

MESH = (2, 2, 1)
STEPS = 8


def two_hosts(memory, send_nothing, rank):
    """Let ranks 0 and 1 be on one host, 2 and 3 on another, each with a memory of its own.

    With `send_nothing` a file that a rank sends to another one ends the run.
    """
    from parallel3d.extras.guard import host_memory
    from parallel3d.mesh.nodes import Nodes
    from parallel3d.train import start

    find_nodes = start.find_nodes
    open_memory = host_memory.HostMemory

    def find(mesh):
        names = tuple("ab"[2 * r // mesh.world.size] for r in range(mesh.world.size))
        assert len(find_nodes(mesh).hosts) == len(names)
        return Nodes(names, names)

    def open_host_memory(mesh, nodes, root, *args):
        folder = memory / nodes.hosts[rank]
        folder.mkdir(parents=True, exist_ok=True)
        return open_memory(mesh, nodes, folder, *args)

    def refuse(self, folder, plan, files):
        assert not plan, plan

    if send_nothing:
        open_memory._copy = refuse
    start.find_nodes = find
    host_memory.HostMemory = open_host_memory


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    root = tmp_path_factory.mktemp("memory")
    config = drill.prepared_config(root, num_layers=1)
    config["parallel3d"]["train"]["steps"] = STEPS
    config["parallel3d"]["checkpoint"] |= {
        "every": 4,
        "in_memory_every": 1,
        "in_memory_folder": str(root),
    }
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

    def start(self, fault="", send_nothing=False, **options):
        hosts = partial(two_hosts, self.memory, send_nothing)
        return super().start(fault, hosts, **options)

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


def unbroken_pair(config, name, **changes):
    """An unbroken run on two ranks."""
    changes["parallel3d__checkpoint__in_memory_every"] = 0
    run = drill.Run(config, name, (1, 2, 1), **changes)
    assert [end.code for end in run.start()] == [0] * 2
    return run


# After the step on disk there are two in memory, of which one may be lost. ZeRO-3's steps in memory
# are in test_host_memory.py.
SHORT = {
    "parallel3d__train__steps": 6,
    "parallel3d__checkpoint__every": 3,
    "zero_optimization__stage": 1,
}


def test_run_resumes_from_the_other_hosts_memory(config, tmp_path):
    """Its process and its memory: the run goes on from the other host's copy, newer than the disk.

    Training goes on while a step is kept, so the last one may not have been.
    """
    run = MemoryRun(config, "lost", tmp_path, (1, 2, 1), **SHORT)
    run.killed(6, 1)
    shutil.rmtree(run.memory / "b")
    newest = max(int(name.removeprefix("step-")) for name in run.steps("a") if ".tmp" not in name)
    assert newest in (4, 5)
    drill.check_resumed(run.start(), newest)
    drill.check_same(run, unbroken_pair(config, "short-pair", **SHORT))
    assert [line["tier"] for line in run.events("launch")] == [None, "memory"]
    assert [*run.memory.rglob("step-*")] == [], "a run that ends well leaves memory free"


def resume_from_copies(config, root, name, dp, shards):
    """A run whose second host is lost, and which goes on from the copies on the first."""
    copies = {"parallel3d__mesh__dp_shards": shards}
    run = MemoryRun(config, name, root, (1, dp, 1), **copies)
    with_copies = run.start(f"kill trainer.step 4 {dp - 1}", send_nothing=True)
    drill.check_died(with_copies, dp - 1)
    assert "each shard from the hosts with its copies" in with_copies[0].log
    shutil.rmtree(run.memory / "b")
    names = [name for name in run.steps("a") if ".tmp" not in name]
    newest = max(int(name.removeprefix("step-")) for name in names)
    assert newest in (2, 3), "of 3 steps at most one is lost"
    files = [path.name for path in run.steps("a")[f"step-{newest}"].glob("*.safetensors")]
    assert len(files) == dp
    drill.check_resumed(run.start(), newest)
    assert [line["tier"] for line in run.events("launch")] == [None, "memory"]
    return run


@pytest.mark.slow  # by default without launches: test_host_memory.py
def test_copies_of_shards_are_the_copies_on_other_hosts(config, tmp_path):
    """Nothing is sent to the next host, and a lost host's shards are read from the other copy."""
    pair = unbroken_pair(config, "pair")
    run = resume_from_copies(config, tmp_path, "copies", dp=2, shards=1)
    # Copies add gradients in another order than shards.
    for line, expected in zip(run.lines, pair.lines, strict=True):
        assert line["tokens"] == expected["tokens"]
        assert line["loss"] == pytest.approx(expected["loss"], rel=2e-5)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)


@pytest.mark.slow
def test_two_shards_of_two_copies_are_read_with_the_same_bits(config, tmp_path):
    copies = {"parallel3d__mesh__dp_shards": 2, "parallel3d__checkpoint__in_memory_every": 0}
    unbroken = drill.Run(config, "copied", (1, 4, 1), **copies)
    assert [end.code for end in unbroken.start()] == [0] * 4
    run = resume_from_copies(config, tmp_path, "two-of-two", dp=4, shards=2)
    drill.check_same(run, unbroken)


@pytest.mark.slow
def test_damaged_copies_are_replaced_by_other_copies(config, unbroken, tmp_path):
    run = MemoryRun(config, "flipped", tmp_path, parallel3d__checkpoint__asynchronous=False)
    name = "shard-00001-of-00004.safetensors"
    run.killed(4, 1)
    flip(run.steps("a")["step-3"] / name)
    ended = run.start("kill trainer.step 3 2")
    drill.check_died(ended, 2)
    assert f"/{run.steps('a')['step-5'].parent.name}/step-3: step 3 of 8" in ended[0].log
    for host in "ab":
        flip(run.steps(host)["step-5"] / name)
    ended = run.start("kill trainer.step 1 0")  # in the step after step 4, which is also on disk
    assert "checkpoints/step-4: step 4 of 8" in ended[0].log, ended[0].log
    drill.check_died(ended, 0)
    drill.check_resumed(run.start(), 4)
    drill.check_same(run, unbroken)
    rejected = [(line["step"], line["file"]) for line in run.events("copy_rejected")]
    assert rejected == [(3, name), (5, name), (5, name)]
    assert [line["tier"] for line in run.events("launch")] == [None, "memory", "disk", "disk"]


@pytest.mark.slow
def test_step_that_fails_twice_is_not_used_from_memory(config, unbroken, tmp_path):
    """Then from the disk, where the third failure would end the run; and memory is used again."""
    run = MemoryRun(config, "twice", tmp_path, parallel3d__checkpoint__asynchronous=False)
    run.killed(7, 1)
    run.killed(1, 1)
    ended = run.start("kill trainer.step 4 1")
    drill.check_died(ended, 1)
    assert "step-6 in memory is not used again: the run failed twice after it" in ended[0].log
    assert "checkpoints/step-4: step 4 of 8" in ended[0].log
    drill.check_resumed(run.start(), 7)
    drill.check_same(run, unbroken)
    tiers = [line["tier"] for line in run.events("launch")]
    assert tiers == [None, "memory", "disk", "memory"]


@pytest.mark.slow
def test_steps_of_an_earlier_history_are_not_used(config, unbroken, tmp_path):
    """Steps of another run of the same name, or from before it went back, are not taken."""
    run = MemoryRun(config, "renamed", tmp_path, parallel3d__checkpoint__asynchronous=False)
    run.killed(4, 1)
    shutil.copytree(run.memory, tmp_path / "stale")
    shutil.rmtree(run.folder)
    ended = run.start("kill trainer.step 6 1")  # step 4 is on disk, step 5 in memory
    assert "resume  " not in ended[0].log, ended[0].log
    drill.check_died(ended, 1)
    shutil.copytree(tmp_path / "stale", run.memory, dirs_exist_ok=True)
    assert {*run.steps("a")} == {"step-2", "step-3", "step-4", "step-5"}
    ended = run.start("kill trainer.step 2 0", parallel3d__checkpoint__in_memory_every=0)
    assert "checkpoints/step-4: step 4 of 8" in ended[0].log
    drill.check_resumed(run.start(), 4)  # not at step 5, of before
    drill.check_same(run, unbroken)
    assert run.steps("a") == run.steps("b") == {}


@pytest.mark.slow
def test_half_of_the_ranks_continue_without_the_lost_host(config, tmp_path):
    """Half of the ranks go on, on the other host: each sample once, with the losses of one run."""
    from tests.hosts.launches import without_dropout

    plain = without_dropout(config)
    run = MemoryRun(plain, "halved", tmp_path, parallel3d__checkpoint__asynchronous=False)
    alone = drill.Run(
        plain,
        "alone",
        (1, 1, 1),
        parallel3d__checkpoint__in_memory_every=0,
        train_micro_batch_size_per_gpu=4,
    )
    assert [end.code for end in alone.start()] == [0]
    run.killed(7, 3)
    shutil.rmtree(run.memory / "b")
    other = MemoryRun(plain, "halved", tmp_path, (1, 2, 1), parallel3d__mesh__dp="auto")
    ended = other.start()
    drill.check_resumed(ended, 6)
    for line, expected in zip(other.lines, alone.lines, strict=True):
        assert line["tokens"] == expected["tokens"]
        assert line["loss"] == pytest.approx(expected["loss"], rel=2e-5)


def test_missing_memory_folder_is_refused(config):
    missing = "/nowhere"
    run = drill.Run(config, "nowhere", (1, 1, 1), parallel3d__checkpoint__in_memory_folder=missing)
    [ended] = run.start()
    assert ended.code == 2
    assert f'parallel3d.checkpoint.in_memory_folder: "{missing}" on ' in ended.log
    assert not run.complete_steps()
