"""Steps in the memory of two hosts, which are two folders: what is left after which loss."""

import json
import os
import shutil
import threading
from functools import partial
from unittest.mock import patch

import pytest
from safetensors.torch import load_file, save_file

from parallel3d.base import journal
from parallel3d.checkpoint import disk, free_space
from parallel3d.checkpoint.find import find_newest
from parallel3d.checkpoint.load import load
from parallel3d.checkpoint.manifest import verify
from parallel3d.checkpoint.on_disk import DiskPlace
from parallel3d.extras.guard.host_memory import HostMemory
from parallel3d.mesh.nodes import Nodes
from parallel3d.models import layers
from parallel3d.verify.local_ranks import run_locally
from tests.checkpoint.resharding import Side, Trained, differences, state, whole
from tests.checkpoint.saving import Named, saver_of
from tests.verify.measuring import number_anew

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("cpu_adam")]

# A rank on each of two hosts, and two.
PAIR = Side((1, 2, 1), 3, model="shallow")
FOUR = Side((2, 2, 1), 3, model="shallow")
# Each host has all shards: a rank's copies of the other's shards are its copies of its file.
COPIES = Side((1, 2, 1), 3, shards=1, model="shallow")
OTHER = Side((2, 1, 1), 1, model="shallow")
HOSTS = {PAIR: "ab", FOUR: "aabb", COPIES: "ab"}
NAME = "run-0123-4567"


def memory_of(mesh, root, hosts, name=NAME, *options):
    """This rank's host's memory; `hosts` has a letter for each rank."""
    folder = root / hosts[mesh.rank]
    folder.mkdir(parents=True, exist_ok=True)
    return HostMemory(mesh, Nodes(tuple(hosts), tuple(hosts)), folder, Named(name, *options))


def steps(root, host):
    return {p.name: p for p in root.glob(f"{host}/parallel3d-*/{NAME}/*")}


def missing_bytes(is_last, *_):
    """Let a million bytes be missing on the last rank."""
    return 10**6 if is_last else 0


def save_on_rank(rank, side, root):
    """Save two steps in memory, and fail to save a third.

    Return the gathered states by step, the steps left in each host's memory, and the messages.
    """
    journal.open_journal(root)
    trained = Trained(side, root)
    messages = []
    gathered = {}
    memory = memory_of(trained.mesh, root / "hosts", HOSTS[side])
    saver = saver_of(trained, root / "disk", [memory], say=messages.append)
    write = disk.write_file
    missing = free_space.missing_disk_bytes
    free_space.missing_disk_bytes = partial(missing_bytes, rank == side.world_size - 1)
    for _ in range(2):
        assert saver.save(state(0), memory) < 10
    free_space.missing_disk_bytes = missing
    assert steps(root / "hosts", "b") == {}
    for step in (1, 2):
        trained.train(1)
        saver.save(state(step), memory)
        gathered[step] = list(trained.gathered())
    saver.finish()
    trained.mesh.barrier()
    if rank == 0:
        shutil.copytree(root / "hosts", root / "kept")
    trained.mesh.barrier()
    messages.append("and")
    # The file of rank 0 arrives on a full memory.
    first = HOSTS[side].index("b")
    os.environ["PARALLEL3D_FAULT"] = f"full checkpoint.before_write 3 {first}"
    saver.save(state(3), memory)
    saver.finish()
    del os.environ["PARALLEL3D_FAULT"]
    trained.mesh.barrier()
    steps_left = {host: sorted(steps(root / "hosts", host)) for host in "ab"}
    # A disk that is slow does not hold up a save in memory.
    goes_on = threading.Event()

    def write_late(path, *args, **options):
        assert root / "disk" not in path.parents or goes_on.wait(60)
        return write(path, *args, **options)

    disk.write_file = write_late
    saver.save(state(3))
    saver.save(state(4), memory)
    assert "step-4" in steps(root / "hosts", "b") and not (root / "disk/step-3").exists()
    goes_on.set()
    saver.require_saved()
    disk.write_file = write
    trained.mesh.barrier()
    trained.engine.close()
    copied = save_copies(root / "copies") if side == PAIR else []
    return gathered, steps_left, messages, copied


def refuse_to_send(memory, folder, plan, files):
    """Stand in for `HostMemory._copy`."""
    assert not plan, plan


def save_copies(root):
    """Save a step in memory, with copies of shards, and send nothing; return what was gathered."""
    trained = Trained(COPIES, root)
    trained.train(1)
    memory = memory_of(trained.mesh, root / "kept", HOSTS[COPIES])
    assert memory.has_copies
    saver = saver_of(trained, root / "disk", [memory])
    with patch.object(HostMemory, "_copy", refuse_to_send):
        saver.save(state(1), memory)
        saver.finish()
    gathered = list(trained.gathered())
    trained.mesh.barrier()
    trained.engine.close()
    return gathered


@pytest.fixture(scope="module", params=[PAIR, pytest.param(FOUR, marks=pytest.mark.slow)], ids=str)
def source(request):
    return request.param


@pytest.fixture(scope="module")
def saved(source, tmp_path_factory):
    """Two steps in the memory of two hosts, with references; and the messages."""
    root = tmp_path_factory.mktemp("saved")
    ranks = run_locally(save_on_rank, source.world_size, source, root)
    for step in (1, 2):
        parts = whole(part for gathered, *_ in ranks for part in gathered[step])
        save_file(parts, root / f"reference-{step}.safetensors")
    if source == PAIR:
        parts = whole(part for *_, copied in ranks for part in copied)
        save_file(parts, root / "copies/reference-1.safetensors")
    _, steps_left, messages, _ = zip(*ranks, strict=True)
    return root, steps_left, messages


@pytest.fixture(scope="module")
def two_steps(saved):
    return saved[0]


def load_each(rank, jobs):
    """Return for each (side, root, cases) what `load_on_rank` does."""
    results = []
    for side, root, cases in jobs:
        number_anew()
        results.append(load_on_rank(side, root, cases))
    return results


def load_on_rank(side, root, cases):
    """Return for each folder of hosts the step that is used, the differences, the rejections."""
    trained = Trained(side, root)
    results = []
    for case, hosts, *options in cases:
        journal.open_journal(root / case)
        memory = memory_of(trained.mesh, root / case, hosts, *options)
        checkpoint, rejected = find_newest([DiskPlace(trained.mesh, root / "none"), memory])
        step = 0
        wrong = []
        if checkpoint:
            step = checkpoint.step
            model = layers(trained.config.model)
            load(checkpoint, engine=trained.engine, mesh=trained.mesh, layers=model)
            reference = load_file(root / f"reference-{step}.safetensors")
            wrong, compared = differences(trained, reference)
            assert compared > 0
            wrong = [text for text in wrong if text != f"{step} optimizer steps"]  # not two
        trained.mesh.barrier()
        results.append((step, wrong, rejected))
    trained.engine.close()
    return results


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 16
    path.write_bytes(data)


def shard(root, host, step, rank, num_ranks):
    return steps(root, host)[f"step-{step}"] / f"shard-{rank:05d}-of-{num_ranks:05d}.safetensors"


def rejections(folder):
    path = folder / "events.jsonl"
    lines = [*map(json.loads, path.read_text().splitlines())] if path.exists() else []
    return [(line["step"], line["file"]) for line in lines if line["event"] == "copy_rejected"]


def damage(root, case, source):
    """A copy of the two hosts' memory that has lost something; the step that is left.

    The newest step loses a file of the last rank of the first host, the older one of the last rank.
    """
    folder = root / case
    last = source.world_size - 1
    beside = last // 2
    shutil.copytree(root / "kept", folder)
    if case in ("host", "both-hosts"):
        shutil.rmtree(folder / "b")
    if case == "both-hosts":
        shutil.rmtree(folder / "a")
    if case.startswith("own"):
        flip(shard(folder, "a", 2, beside, source.world_size))
    if case in ("own-and-peer", "all"):
        flip(shard(folder, "b", 2, beside, source.world_size))
    if case == "all":
        flip(shard(folder, "a", 2, beside, source.world_size))
        flip(shard(folder, "a", 1, last, source.world_size))
        flip(shard(folder, "b", 1, last, source.world_size))
    if case == "manifest":
        flip(steps(folder, "b")["step-2"] / "manifest.json")
    if case == "state":
        flip(steps(folder, "a")["step-2"] / "state.json")
    return folder


CASES = {  # the whole memory, on another mesh too: test_other_meshes_and_hosts_read_the_copies
    "host": 2,
    "own": 2,
    "manifest": 2,
    "state": 2,
    "own-and-peer": 1,
    "all": 0,
    "both-hosts": 0,
}


def losses_of(source, root):
    """Return the job of loading after each loss."""
    for case in CASES:
        damage(root, case, source)
    return source, root, [(case, HOSTS[source]) for case in CASES]


def other_side_of(side, hosts, root):
    """Return the job of loading on another mesh and other hosts."""
    names = [f"{case}-{side}" for case in ("reshaped", "host", "refused", "other", "older")]
    for name in names:
        shutil.copytree(root / "kept", root / name)
    shutil.rmtree(root / names[1] / ("b" if "a" in hosts else "a"))
    options = [(), (), (NAME, 2), ("run-0123-8888",), (NAME, 1)]
    return side, root, [(name, hosts, *more) for name, more in zip(names, options, strict=True)]


def copies_of(root):
    """Return the job of loading copies of shards after the loss of a host."""
    for host in "ab":
        assert len([*steps(root / "kept", host)["step-1"].glob("*.safetensors")]) == 2
    shutil.copytree(root / "kept", root / "lost")
    shutil.rmtree(root / "lost/b")
    return COPIES, root, [("lost", HOSTS[COPIES])]


@pytest.fixture(scope="module")
def loaded(two_steps, source):
    """Return by job's name what each rank loaded, with what two ranks load in one start."""
    jobs = {"losses": losses_of(source, two_steps)}
    if source == PAIR:
        jobs["other side"] = other_side_of(OTHER, "ab", two_steps)
        jobs["copies"] = copies_of(two_steps / "copies")
    ranks = run_locally(load_each, source.world_size, [*jobs.values()])
    return dict(zip(jobs, zip(*ranks, strict=True), strict=True))


def test_newest_complete_step_survives_each_loss(loaded, two_steps, source):
    size = source.world_size
    ranks = loaded["losses"]
    for case, *results in zip(CASES, *ranks, strict=True):
        assert {step for step, _, _ in results} == {CASES[case]}, (case, results)
        assert all(wrong == [] for _, wrong, _ in results), (case, results)
    name = shard(two_steps / "own", "a", 2, (size - 1) // 2, size).name
    assert rejections(two_steps / "own") == [(2, name)]
    assert rejections(two_steps / "own-and-peer") == [(2, name)] * 2
    assert len(rejections(two_steps / "all")) == 4
    assert rejections(two_steps / "manifest") == [(2, "manifest.json")]
    assert rejections(two_steps / "state") == [(2, "state.json")]
    (text,) = ranks[-1][[*CASES].index("own-and-peer")][2]
    assert text == f"step-2 in memory is rejected: no host has an intact copy of {name}"
    # What a host had lost and its ranks read is there again, with its manifest.
    last_of_a = size // 2 - 1
    first_of_b = size // 2
    for case, host, rank in (
        ("host", "b", first_of_b),
        ("own", "a", last_of_a),
        ("manifest", "b", first_of_b),
    ):
        assert shard(two_steps / case, host, 2, rank, size).exists()
        assert (steps(two_steps / case, host)["step-2"] / "manifest.json").exists()


@pytest.fixture
def loaded_from_pair(loaded, source):
    if source != PAIR:
        pytest.skip("the pair of ranks has loaded it")
    return loaded


def test_other_meshes_and_hosts_read_the_copies(loaded_from_pair):
    """Also after the loss of a host.

    Of a step after which the run has failed twice, or of another run, nothing is used.
    """
    check_other_side(loaded_from_pair["other side"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("side", "hosts"),
    [
        (OTHER, "ba"),
        (Side((1, 1, 2), 0, model="shallow"), "ca"),
        (Side((1, 2, 2), 3, model="shallow"), "bbbb"),
        (Side((2, 1, 2), 1, model="shallow"), "abca"),
    ],
    ids=str,
)
def test_more_meshes_and_hosts_read_the_copies(two_steps, side, hosts):
    """Also on a host that had no memory of the run."""
    job = other_side_of(side, hosts, two_steps)
    ranks = run_locally(load_each, side.world_size, [job])
    check_other_side([results for (results,) in ranks])


def check_other_side(ranks):
    for results in ranks:
        assert [(step, wrong) for step, wrong, _ in results] == [
            (2, []),
            (2, []),
            (0, []),
            (0, []),
            (2, []),
        ], results
        assert len(results[2][2]) == 2 and results[3][2] == []


def test_copies_of_shards_are_the_copies_on_other_hosts(loaded_from_pair):
    """Nothing was sent to the next host, and a lost host's shards are read from the other copy."""
    for results in loaded_from_pair["copies"]:
        assert results == [(1, [], [])]


def test_host_without_room_keeps_its_steps_and_the_run_continues(saved, source):
    root, steps_left, messages = saved
    assert steps_left == ({"a": ["step-2"], "b": ["step-2"]},) * source.world_size
    first, second = "\n".join(messages[0]).split("\nand\n")
    assert first.startswith("NOT SAVED IN MEMORY: ") and first.count("missing on a host") == 1
    assert second.startswith(
        f"NOT SAVED IN MEMORY: rank {source.world_size // 2}: No space left on device"
    )
    events = [*map(json.loads, (root / "events.jsonl").read_text().splitlines())]
    assert [e["tier"] for e in events if e["event"] == "not_saved"] == ["memory"] * 2, events
    for host in "ab":
        folders = steps(root / "hosts", host)
        assert {*folders} == {"step-2", "step-4"}
        assert verify(folders["step-4"]) == []
        assert (folders["step-4"].parents[1].stat().st_mode & 0o777) == 0o700
