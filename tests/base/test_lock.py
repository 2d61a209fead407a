"""A lock has one holder, on any file system, and a dead one is never in the way."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from parallel3d.base import lock
from parallel3d.base.lock import Holder, Lock, LockHeld, read, start_of

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).parents[2]
# Takes the lock, says so, and holds it until its standard input ends.
HOLD = """
import sys
from pathlib import Path
from parallel3d.base import lock
held = lock.Lock(Path(sys.argv[1]))
try:
    held.take()
except lock.LockHeld as error:
    print("held", error.holder.pid, flush=True)
else:
    print("mine", flush=True)
    sys.stdin.read()
    held.release()
"""


def replace(holder, **changes):
    return holder.model_copy(update=changes)


@contextmanager
def processes(path, number):
    code = [sys.executable, "-c", HOLD, str(path)]
    started = [
        subprocess.Popen(code, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(number)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("number", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_one_process_holds_the_lock_and_a_killed_holder_is_replaced_at_once(tmp_path, number):
    path = tmp_path / "run.lock"
    for _ in range(2):  # the second time the file of the first holder is in the way
        with processes(path, number) as started:
            answers = [process.stdout.readline().split() for process in started]
            [holder] = [p for p, words in zip(started, answers, strict=True) if words == ["mine"]]
            assert all(words == ["held", str(holder.pid)] for words in answers if len(words) > 1)
            assert len([words for words in answers if words[0] == "held"]) == number - 1
            os.kill(holder.pid, signal.SIGKILL)
            holder.wait()
    assert [p.name for p in tmp_path.iterdir()] == ["run.lock"]
    with processes(path, 1) as [last]:
        assert last.stdout.readline() == "mine\n"
        last.communicate("")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.05)
    monkeypatch.setattr(lock, "MISSED", 6)
    monkeypatch.setattr(lock, "_NAP", 0.02)
    monkeypatch.setattr(lock, "_WRITTEN", 0.1)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch, quick):
    """A lock that a process of another machine has taken; it beats until it is released."""
    monkeypatch.setattr(lock, "end_this_process", lambda text: None)
    other = Lock(tmp_path / "run.lock")
    other.this_process = replace(other.this_process, host="node7", pid=1)
    other.take()
    yield other
    other.release()


def test_heartbeat_of_another_machine_keeps_the_lock(elsewhere):
    messages = []
    with pytest.raises(LockHeld, match="process 1 on node7, since 2"):
        Lock(elsewhere.path).take(messages.append)
    assert len(messages) == 1 and "waiting up to" in messages[0]
    assert read(elsewhere.path).token == elsewhere.this_process.token


def test_lock_is_taken_after_enough_missed_heartbeats(elsewhere, monkeypatch):
    elsewhere._ended.set()  # the file stays, like after a power cut
    elsewhere._heart.join()
    mine = Lock(elsewhere.path)
    began = time.monotonic()
    assert mine.try_to_take().host == "node7"  # who does not wait does not get it
    mine.take()
    assert time.monotonic() - began >= lock.BEAT * lock.MISSED
    assert read(mine.path).token == mine.this_process.token
    mine.release()


def test_waiting_for_a_silent_holder_is_announced(elsewhere):
    elsewhere._ended.set()
    elsewhere._heart.join()
    messages = []
    mine = Lock(elsewhere.path)
    mine.wait(lambda: messages.append("waiting"))
    mine.release()
    assert messages == ["waiting"]


def test_silent_holder_is_told_that_it_lost_the_lock(tmp_path, quick, monkeypatch):
    lost = []
    monkeypatch.setattr(lock, "end_this_process", lost.append)
    first = Lock(tmp_path / "run.lock")
    first.take()
    first.path.unlink()
    second = Lock(first.path)
    second.take()
    first._heart.join(5)
    assert len(lost) == 1 and "was taken over by process" in lost[0]
    first.release()
    assert read(first.path).token == second.this_process.token  # not the first's to remove
    second.release()


def test_lock_file_stays_in_its_folder_when_the_process_changes_directory(
    tmp_path, quick, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    held = Lock(Path("run.lock"))
    held.take()
    (tmp_path / "below").mkdir()
    monkeypatch.chdir("below")
    (tmp_path / "below/run.lock").write_text("another's")
    time.sleep(4 * lock.BEAT)
    held.release()
    assert [path.name for path in tmp_path.iterdir()] == ["below"]


def test_deleted_lock_file_is_created_again(tmp_path, quick):
    held = Lock(tmp_path / "run.lock")
    held.take()
    held.path.unlink()
    while not held.path.exists():
        time.sleep(0.01)
    with pytest.raises(LockHeld):
        Lock(held.path).take()
    held.release()


ME = Lock(Path("never")).this_process
DEAD = [
    (replace(ME, started="1"), ()),  # another process has the pid now
    (replace(ME, pid=2**22 + 1), ()),
    (replace(ME, host="node7", jobs=(("slurm", "5", 0),)), (("slurm", "5", 1),)),  # requeued
    (replace(ME, pid=2**22 + 1, jobs=(("torchelastic", "x", 1),)), (("torchelastic", "x", 2),)),
]
ALIVE = [
    (ME, ()),
    (replace(ME, jobs=(("slurm", "5", 0),)), (("slurm", "5", 0),)),  # two steps of one job
    (replace(ME, jobs=(("slurm", "5", 0),)), (("slurm", "6", 1),)),
    # Two terminals with one --rdzv-id: the second's restarts do not end the first.
    (replace(ME, jobs=(("torchelastic", "100", 0),)), (("torchelastic", "100", 1),)),
]
UNKNOWN = [
    (replace(ME, host="node7"), ()),
    (replace(ME, place="other"), ()),
    (replace(ME, started=""), ()),  # where the kernel does not tell it
    (replace(ME, host="node7", jobs=(("torchelastic", "100", 0),)), (("torchelastic", "100", 1),)),
]


HOLDERS = (
    [(False, *case) for case in DEAD]
    + [(True, *case) for case in ALIVE]
    + [(None, *case) for case in UNKNOWN]
)


@pytest.mark.parametrize(("alive", "holder", "jobs"), HOLDERS)
def test_holder_is_alive_dead_or_unknown(alive, holder: Holder, jobs):
    assert holder.is_alive(jobs) is alive


def test_zombie_process_is_dead():
    child = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE)
    started = start_of(child.pid)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert started and start_of(child.pid) is None
    child.communicate()


def test_process_killed_while_taking_over_does_not_block_the_lock(tmp_path, quick):
    path = tmp_path / "run.lock"
    dead = replace(ME, pid=2**22 + 1)
    path.write_text(dead.model_dump_json())
    (tmp_path / f"run.lock.{dead.token}").write_text(
        replace(dead, token="another").model_dump_json()
    )
    mine = Lock(path)
    mine.take()
    assert [p.name for p in tmp_path.iterdir()] == ["run.lock"]
    mine.release()


def test_lock_is_read_once_its_creator_has_written_to_it(tmp_path):
    path = tmp_path / "run.lock"
    path.touch()
    writer = threading.Timer(0.1, lambda: path.write_text(ME.model_dump_json()))
    writer.start()
    assert read(path) == ME
    writer.join()


@pytest.mark.parametrize("text", ["", "{", '{"jobs": [], "x": 1}'])
def test_damaged_lock_file_counts_as_a_silent_holder(tmp_path, quick, text):
    path = tmp_path / "run.lock"
    path.write_text(text)
    mine = Lock(path)
    assert mine.try_to_take() is not None
    mine.take()
    mine.release()
    assert not path.exists()
