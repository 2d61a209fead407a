"""Saving on real ranks: what is in the files, what stays of older ones, what a save costs."""

import json
import threading
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from parallel3d.checkpoint import chunk_runs, disk
from parallel3d.checkpoint.chunks import ChunkFile
from parallel3d.checkpoint.find import find_named
from parallel3d.checkpoint.load import load
from parallel3d.checkpoint.manifest import verify
from parallel3d.checkpoint.on_disk import DiskPlace
from parallel3d.extras.guard.host_memory import HostMemory
from parallel3d.mesh.nodes import find_nodes
from parallel3d.models import layers
from parallel3d.verify.local_ranks import run_locally
from tests.checkpoint.resharding import Side, Trained, state
from tests.checkpoint.saving import Named, names, on_two_ranks, saver_of, scenario_folder

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("cpu_adam")]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ZeRO 0 writes shares of what every rank has; tp ranks share norms; pp ranks share a tied weight.
SIDES = [
    Side((1, 2, 1), 0),
    Side((1, 4, 1), 0),
    Side((2, 1, 2), 1, "cpu"),
    Side((1, 2, 2), 3, tied=False),
    Side((2, 2, 1), 3, "nvme", precision="bf16"),
]


def save_both_ways(rank, sides, root):
    """A synchronous save, an asynchronous one, and while it is written another step, in memory."""
    write = disk.write_file
    moved = []
    chunk_runs.SMALLEST = 64  # so that the copy has several pieces
    for side in sides:
        trained = Trained(side, root)
        trained.train()
        folder = root / str(side)
        memory = HostMemory(trained.mesh, find_nodes(trained.mesh), root, Named(f"{side}-0"))
        first = saver_of(trained, folder / "waiting", [memory], asynchronous=False)
        second = saver_of(trained, folder / "behind", [memory], asynchronous=True)
        first.save(state(2))
        stepped = threading.Event()

        def write_later(path, *args, stepped=stepped, memory=memory, **options):
            assert memory.folder in path.parents or stepped.wait(60)
            return write(path, *args, **options)

        before = {name: value["master"] for name, _, _, value in trained.gathered()}
        disk.write_file = write_later
        second.save(state(2))
        trained.train(1)
        second.save(state(3), memory)  # not from the copy that is written
        after = {name: value["master"] for name, _, _, value in trained.gathered()}
        moved.append(all(not before[name].equal(after[name]) for name in before))
        stepped.set()
        second.require_saved()
        disk.write_file = write
        trained.mesh.barrier()
        trained.engine.close()
    return moved


@pytest.mark.usefixtures("cpu_adam", "operators")
@pytest.mark.parametrize(
    "sides", [SIDES[:1], pytest.param(SIDES[1:], marks=pytest.mark.slow)], ids=["one", "others"]
)
def test_asynchronous_checkpoint_equals_synchronous_one(sides, tmp_path):
    """Byte for byte, although training went on; and each element is in it once."""
    for moved in run_locally(save_both_ways, sides[0].world_size, sides, tmp_path):
        assert moved == [True] * len(sides)
    for side in sides:
        waiting = tmp_path / str(side) / "waiting" / "step-2"
        behind = tmp_path / str(side) / "behind" / "step-2"
        assert contents(waiting) == contents(behind)
        assert verify(next(tmp_path.glob(f"*/{side}-0/step-3"))) == []
        assert verify(behind) == []
        shapes = json.loads((behind / "state.json").read_text())["parameters"]
        assert sum(elements(behind).values()) == 4 * num_elements(side, shapes)
        if side.zero == 0:
            assert len(elements(behind)) == side.world_size
            assert len(set(elements(behind).values())) == 1  # this model divides by both


def elements(folder):
    """How many elements each file of a checkpoint holds; the headers alone are read."""
    num_elements_by_file = Counter()
    for path in folder.glob("*.safetensors"):
        with ChunkFile(path) as file:
            assert file.chunks
            num_elements_by_file[path.name] = sum(chunk.box.numel for chunk in file.chunks)
    return num_elements_by_file


def num_elements(side, shapes):
    """Counted by hand: hidden 32, 2 layers, vocabulary 61, 16 places."""
    assert side.model == "gpt"
    block = 12 * 32 * 32 + 13 * 32
    output = 0 if side.tied else 61 * 32
    assert ("head.output.weight" in shapes) == (not side.tied), list(shapes)
    return 61 * 32 + 16 * 32 + 2 * block + 2 * 32 + output


def save_twice(rank, trained, folder):
    """Two saves at once, the first of which is slow on rank 1; the most that wrote together."""
    saver = saver_of(trained, folder)
    write = disk.write_file
    writing = []
    most = []

    def slow(path, *args, **options):
        writing.append(path)
        most.append(len({p.parent.name for p in writing}))
        if rank == 1 and path.parent.name == "step-1.tmp":
            time.sleep(0.4)
        entry = write(path, *args, **options)
        writing.remove(path)
        return entry

    disk.write_file = slow
    stalls = [saver.save(state(step)) for step in (1, 2)]
    busy = saver._running is not None
    saver.require_saved()
    disk.write_file = write
    trained.mesh.barrier()
    return stalls, max(most), busy


def test_second_save_waits_for_the_first(ended):
    root, results = ended
    for stalls, most, busy in results[save_twice]:
        assert most == 1 and busy
        assert stalls[1] > 0.3  # it had to wait for the first
    assert names(scenario_folder(save_twice, root)) == ["latest", "step-1", "step-2"]


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_the_newest(rank, trained, folder, name):
    """Saves 1 to 3, the files of 3 damaged before they are read again; then 4."""
    messages = []
    keep_newest = DiskPlace._keep_newest
    saver = saver_of(trained, folder, say=messages.append)
    for step in (1, 2):
        saver.save(state(step))

    def meanwhile(place, newest, own_files):
        if rank == 0:
            flip_a_bit(newest / name)
        trained.mesh.messages.gather_texts("", aside=True)
        return keep_newest(place, newest, own_files)

    saver.finish()
    DiskPlace._keep_newest = meanwhile
    saver.save(state(3))
    saver.finish()
    trained.mesh.barrier()
    left = names(folder)
    DiskPlace._keep_newest = keep_newest
    saver.save(state(4))
    saver.require_saved()
    trained.mesh.barrier()
    return messages, left, names(folder)


def check_damaged(root, results, name):
    for messages, left, then in results[damage_the_newest]:
        (text,) = messages
        assert "CHECKPOINT NOT SAVED" in text and "step-3" in text and name in text, text
        assert left == ["latest", "step-1", "step-2"]
        assert then == ["latest", "step-2", "step-4"]
    assert verify(scenario_folder(damage_the_newest, root) / "step-2") == []


def test_older_checkpoints_stay_until_the_newer_one_is_verified(ended):
    check_damaged(*ended, SHARD)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
def test_older_checkpoints_stay_until_each_file_is_verified(name, tmp_path):
    check_damaged(tmp_path, on_two_ranks(tmp_path, (damage_the_newest, name)), name)


def save_among_leftovers(rank, trained, folder):
    """Saves where a killed save and another history have left things."""
    if rank == 0:
        for name in ("step-3.tmp", "step-8.deleted", "step-7.tmp"):
            (folder / name).mkdir(parents=True)
            (folder / name / "junk").write_text("junk")
    trained.mesh.barrier()
    saver = saver_of(trained, folder, keep=3, always=(1, 9))
    for step in (1, 2, 3, 4, 5, 5):
        if step == 5:
            trained.train(1)
        saver.save(state(step))
    saver.require_saved()
    trained.mesh.barrier()
    left = names(folder)
    trained.mesh.barrier()
    if rank == 0:
        disk.remove_leftovers(folder)
    return left, trained.engine.states.counters()["optimizer_steps"]


SHARD = "shard-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Return the folder of the scenarios of two ranks, and what each returned on them."""
    root = tmp_path_factory.mktemp("saves")
    scenarios = (save_twice,), (damage_the_newest, SHARD), (save_among_leftovers,)
    return root, on_two_ranks(root, *scenarios)


def test_leftovers_do_not_block_a_save_and_are_removed(ended):
    root, results = ended
    folder = scenario_folder(save_among_leftovers, root)
    for left, steps in results[save_among_leftovers]:
        kept = ["step-1", "step-3", "step-4", "step-5"]
        assert left == ["latest", *kept, "step-7.tmp", "step-8.deleted"]
        # The folder of another history under the same name was replaced.
        assert json.loads((folder / "step-5/state.json").read_text())["optimizer_steps"] == steps
    assert names(folder) == ["latest", *kept]
    assert all(verify(folder / name) == [] for name in kept)
    assert "junk" not in names(folder / "step-3")


WIDE = Side((1, 1, 2), 3, model="wide")
MIB = 2**20


def peak_of(work):
    """Bytes by which the process's memory grew at most while it did something."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def weigh(rank, root):
    """This rank's state in bytes, and the peaks of two saves and two loads."""
    trained = Trained(WIDE, root)
    trained.train(1)
    waiting = saver_of(trained, root / "waiting", asynchronous=False)
    behind = saver_of(trained, root / "behind")
    waiting.save(state(0))  # the first save imports modules, which are no copies

    def save_behind():
        behind.save(state(1))
        behind.finish()

    peaks = [peak_of(lambda: waiting.save(state(1))), peak_of(save_behind)]
    copied = sum(array.nbytes for array in behind._buffers[0].arrays())
    size = waiting.num_bytes // trained.mesh.world.size
    trained.mesh.barrier()
    trained.engine.close()
    # tp cuts rows and columns; here a rank needs whole tensors' flat halves of both ranks' files.
    other = Trained(replace(WIDE, mesh=(1, 2, 1)), root)
    checkpoint = find_named(root / "waiting", 1, other.mesh)
    model = layers(other.config.model)
    read = partial(load, checkpoint, engine=other.engine, mesh=other.mesh, layers=model)
    read()
    peaks.append(peak_of(read))
    return size, copied, peaks


def test_save_and_load_need_little_memory(tmp_path):
    """A synchronous save holds a few tensors more, a load a buffer; only a copy is a copy."""
    for size, copied, (waiting, behind, loading) in run_locally(weigh, 2, tmp_path):
        assert size > 20 * MIB
        assert waiting < 8 * MIB and loading < 16 * MIB, (waiting, loading)
        # In memory that was free, or new.
        assert size - MIB / 2 < copied < size + MIB and behind < size + 8 * MIB, (behind, size)
