"""What a save that fails does to training: nothing, until three in a row have failed."""

import errno
import json
import os
import re
import shutil
import threading
import time
from pathlib import Path

import psutil
import pytest

from parallel3d.base.errors import TrainingError
from parallel3d.checkpoint import disk
from parallel3d.checkpoint.manifest import verify
from parallel3d.checkpoint.on_disk import MOST_FAILURES
from parallel3d.huggingface import from_ranks
from parallel3d.huggingface.from_ranks import write_tensor
from parallel3d.train.ending import DONE
from tests.checkpoint.drill import changed, prepared_config
from tests.checkpoint.resharding import state
from tests.checkpoint.saving import names, on_two_ranks, saver_of, scenario_folder
from tests.train.running import folder_of, start_all

pytestmark = pytest.mark.gloo


def let_the_disk_be_full(full=True):
    os.environ["PARALLEL3D_FAULT"] = "full checkpoint.before_write 1 0"
    if not full:
        del os.environ["PARALLEL3D_FAULT"]


def fill_the_disk(rank, trained, folder, behind):
    """Save on a disk that is full once, then not, then for good; return messages and folders."""
    messages = []
    seen = []
    saver = saver_of(trained, folder, asynchronous=behind, say=messages.append)
    saver.save(state(1))
    saver.require_saved()
    for step in (2, 3, 4, 5, 6):
        let_the_disk_be_full(step != 3)
        saver.save(state(step))
        saver.finish()
        seen.append((saver.broken, len(messages), names(folder)))
    let_the_disk_be_full(False)
    saver.save(state(7))  # training stops: nothing is begun
    with pytest.raises(TrainingError, match=r"the last checkpoint was not saved: .*No space left"):
        saver.require_saved()
    trained.mesh.barrier()
    return messages, seen, names(folder)


def check_full(results):
    """Only rank 0's disk is full; all ranks say the same, and count the same."""
    one = ["latest", "step-1"]
    two = ["latest", "step-1", "step-3"]
    for messages, seen, left in results[fill_the_disk]:
        assert seen == [
            (False, 1, one),
            (False, 1, two),
            (False, 2, two),
            (False, 3, two),
            (True, 4, two),
        ]
        assert left == two
        for text, step, number in zip(messages, (2, 4, 5, 6), (1, 1, 2, 3), strict=True):
            assert text.startswith(f"CHECKPOINT NOT SAVED ({number} of {MOST_FAILURES} in a row)")
            assert "No space left on device" in text and f"step-{step}.tmp" in text
        assert "the next save tries again" in messages[2] and "Training stops" in messages[3]


def test_full_disk_costs_only_the_checkpoint(ended):
    check_full(ended[1])


@pytest.mark.slow
def test_full_disk_costs_only_a_synchronous_checkpoint(tmp_path):
    check_full(on_two_ranks(tmp_path, (fill_the_disk, False)))


def know_of_no_room(rank, trained, folder):
    """Rank 1 has no file left to ask for the room; the save needs none on that rank."""
    usage = shutil.disk_usage

    def fail(path):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    saver = saver_of(trained, folder)
    if rank == 1:
        shutil.disk_usage = fail
    saver.save(state(1))
    shutil.disk_usage = usage
    saver.require_saved()
    return names(folder)


def test_rank_that_cannot_query_free_space_saves(ended):
    assert ended[1][know_of_no_room] == (["latest", "step-1"],) * 2


def have_no_room(rank, trained, folder):
    """Rank 1 sees a disk on which the checkpoint does not fit."""
    messages = []
    usage = shutil.disk_usage

    def usage_with(free_bytes):
        return lambda path: usage(path)._replace(free=free_bytes)

    saver = saver_of(trained, folder, say=messages.append)
    if rank == 1:
        shutil.disk_usage = usage_with(2**20 + saver.num_bytes - 1)
    stall = saver.save(state(1))
    left = names(folder)
    shutil.disk_usage = usage_with(2**20 + saver.num_bytes)
    saver.save(state(2))
    saver.require_saved()
    shutil.disk_usage = usage
    trained.mesh.barrier()
    return messages, stall, left, names(folder), saver.num_bytes


def test_free_space_is_checked_before_saving(ended):
    root, results = ended
    for messages, stall, before, after, size in results[have_no_room]:
        (text,) = messages
        assert "1 byte of disk space missing for" in text, text
        assert before == [] and after == ["latest", "step-2"] and stall >= 0
        files = (scenario_folder(have_no_room, root) / "step-2").glob("*.safetensors")
        assert size == sum(path.stat().st_size for path in files)


def have_little_memory(rank, trained, folder):
    """Rank 1 has no memory for a copy."""
    messages = []
    memory = psutil.virtual_memory
    started = []
    start = threading.Thread.start

    def note_start(thread):
        started.append(thread.name)
        start(thread)

    def no_memory():
        return memory()._replace(available=0)

    threading.Thread.start = note_start
    saver = saver_of(trained, folder, say=messages.append)
    if rank == 1:
        psutil.virtual_memory = no_memory
    saver.save(state(1))
    first = names(folder), "checkpoint" in started
    psutil.virtual_memory = memory
    saver.save(state(2))
    saver.require_saved()
    threading.Thread.start = start
    trained.mesh.barrier()
    return messages, *first, names(folder), "checkpoint" in started


def test_training_waits_for_the_save_without_memory_for_a_copy(ended):
    root, results = ended
    for messages, first, behind, then, behind_then in results[have_little_memory]:
        (text,) = messages
        assert "host memory lacks" in text and "checkpoint.asynchronous" in text
        assert first == ["latest", "step-1"] and not behind  # there when `save` returned
        assert then == ["latest", "step-1", "step-2"] and behind_then
    assert verify(scenario_folder(have_little_memory, root) / "step-1") == []


def break_the_thread(rank, trained, folder):
    """Rank 1's writing ends in an error that nobody has thought of."""
    messages = []
    write = disk.write_file
    saver = saver_of(trained, folder, say=messages.append)

    def broken(*args, **options):
        raise ArithmeticError("nobody has thought of it")

    disk.write_file = broken if rank == 1 else write
    saver.save(state(1))
    deadline = time.monotonic() + 20
    while not messages and time.monotonic() < deadline:
        saver.poll()  # the trainer polls after each step
        time.sleep(0.01)
    disk.write_file = write
    left = names(folder)
    trained.mesh.barrier()
    saver.save(state(2))
    saver.require_saved()
    trained.mesh.barrier()
    return messages, left, names(folder)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Return the folder of the scenarios of two ranks, and what each returned on them."""
    root = tmp_path_factory.mktemp("failures")
    scenarios = [
        (fill_the_disk, True),
        (know_of_no_room,),
        (have_no_room,),
        (have_little_memory,),
        (break_the_thread,),
    ]
    return root, on_two_ranks(root, *scenarios)


def test_error_of_an_asynchronous_save_is_reported(ended):
    for messages, left, then in ended[1][break_the_thread]:
        (text,) = messages
        assert "ArithmeticError: nobody has thought of it" in text and "rank 1" in text
        assert left == [] and then == ["latest", "step-2"]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    config = prepared_config(tmp_path_factory.mktemp("save"), num_layers=1)
    return changed(config, {"zero_optimization.stage": 1})


def fill_the_disk_for_step_2(rank):
    """Rank 1's disk is full while the first checkpoint of the run "room" is written."""
    write = disk.write_file

    def full(path, *args, **options):
        if rank == 1 and path.parent.name == "step-2.tmp" and "room" in path.parts:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, *args, **options)

    disk.write_file = full


@pytest.fixture(scope="module")
def room_and_full(config):
    """Return the configs of two runs and what their ranks came to: a full disk for once, for good.

    Of the second run only rank 0's disk is full.
    """
    changes = {"parallel3d.run.name": "room", "parallel3d.train.steps": 5}
    room = changed(config, changes | {"parallel3d.checkpoint.every": 2})
    changes = {"parallel3d.run.name": "full", "parallel3d.train.steps": 30}
    full = changed(config, changes | {"parallel3d.checkpoint.every": 1})
    runs = [(room, fill_the_disk_for_step_2), (full, fill_the_disk_for_good)]
    return list(zip([room, full], start_all(runs, (1, 2, 1)), strict=True))


def test_training_continues_with_full_disk_and_saves_when_there_is_room(room_and_full):
    raw, ranks = room_and_full[0]
    assert [ended.code for ended in ranks] == [DONE] * 2, ranks
    assert ranks[0].says("CHECKPOINT NOT SAVED (1 of 3 in a row)") == 1
    assert ranks[0].says("CHECKPOINT NOT SAVED") == 1
    assert names(folder_of(raw) / "checkpoints") == ["latest", "step-4", "step-5"]
    lines = [json.loads(x) for x in (folder_of(raw) / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 6))
    stalls = {line["step"]: line.get("checkpoint_stall_seconds") for line in lines}
    # On the line after each save.
    assert [step for step, stall in stalls.items() if stall is not None] == [3, 5]
    assert all(0 < stall < 30 for stall in stalls.values() if stall is not None)


def fill_the_disk_for_good(rank):
    let_the_disk_be_full()


def test_training_stops_after_three_failed_saves_in_a_row(room_and_full):
    """Every rank stops at the same step with the same words."""
    raw, ranks = room_and_full[1]
    (error,) = {ended.error for ended in ranks}
    assert error.startswith("TrainingError: 3 checkpoints in a row could not be saved"), ranks
    assert re.search(r"Mend the cause \(rank 0: .*No space left.*\), and start again", error), error
    assert ranks[0].says("CHECKPOINT NOT SAVED") == MOST_FAILURES
    assert names(folder_of(raw) / "checkpoints") == []
    trained = (folder_of(raw) / "metrics.jsonl").read_text().count("\n")
    assert MOST_FAILURES <= trained <= MOST_FAILURES + 2


def fill_the_disk_at_the_end(rank):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    from_ranks.write_tensor = full


def make_room_at_the_end(rank):
    from_ranks.write_tensor = write_tensor


def test_weights_lost_to_a_full_disk_are_written_by_the_same_command(config):
    name = {"parallel3d.run.name": "auto", "parallel3d.train.steps": 2}
    raw = changed(config, name | {"parallel3d.run.save_weights": True})
    runs = [(raw, fill_the_disk_at_the_end), (raw, make_room_at_the_end)]
    (full,), (again,) = start_all(runs, (1, 1, 1))
    assert full.error.startswith("TrainingError: cannot write the trained weights to ")
    assert "run the same command again" in full.error
    assert again.code == DONE and again.samples == []
    assert again.says("all its 2 steps were done before") == 1
    [folder] = Path(raw["parallel3d"]["run"]["directory"]).glob("gpt-*")
    assert (folder / "weights/model.safetensors").exists()
