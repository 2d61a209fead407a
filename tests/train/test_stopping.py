"""Requests to stop and to save: heard on one rank, agreed on by all, wherever they are."""

import hashlib
import os
import signal
import subprocess
import time

import pytest
import torch.distributed as dist

from parallel3d.base.errors import TrainingError
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.train import ending
from parallel3d.train.ending import STOPPED, Ending, Stopped, StopRequest

pytestmark = pytest.mark.gloo


def send(number=signal.SIGTERM):
    """To this process itself; returns when its handlers have run."""
    os.kill(os.getpid(), number)
    time.sleep(0.01)


def ended(function, seconds):
    """The exit code of a process that does this, and how long it took."""
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        signal.alarm(seconds)
        try:
            function()
        finally:
            os._exit(99)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), time.monotonic() - start


@pytest.fixture
def stop():
    """A request that is held in training, with this process's handlers put back afterwards."""
    handlers = {number: signal.getsignal(number) for number in ending.SIGNALS}
    with StopRequest().listening() as request:
        request.hold(None)
        yield request
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_losing_stopped_peer_counts_as_stop_request(monkeypatch, capsys):
    """The backend sees the loss, and the judge has heard why."""
    told = pulse.Outcome("a rank was asked", False, STOPPED)
    monkeypatch.setattr(pulse, "outcome", lambda seconds=0.0: told)
    end = Ending()
    assert end.on_own_error(dist.DistNetworkError("gone")) == STOPPED
    assert capsys.readouterr().err.startswith("stopped on request before the first step; ")


def test_busy_library_is_ended(monkeypatch):
    """No Python runs while C computes: the process is ended for it, after its grace."""

    def compute():
        with StopRequest().listening():
            child = os.fork()
            if child == 0:
                time.sleep(0.05)
                os.kill(os.getppid(), signal.SIGTERM)
                os._exit(0)
            hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

    monkeypatch.setattr(ending, "_GRACE", 0.2)
    code, seconds = ended(compute, 60)
    assert code == STOPPED and 0.2 < seconds < 30


def test_end_of_deepspeed_command_is_request_to_stop(stop, monkeypatch):
    """Its node's launcher, which is a rank's parent, lives on and passes nothing on."""
    command = ["sh", "-c", "sh -c 'echo $$; sleep 60; :' deepspeed.launcher.launch & wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as started:
        node = int(started.stdout.readline())
        monkeypatch.setattr(os, "getppid", lambda: node)
        with StopRequest().listening() as request:
            request.hold(None)
            time.sleep(2 * ending._LOOK)
            assert not request.requested
            started.kill()
            started.wait()
            deadline = time.monotonic() + 20
            while not request.requested:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        os.killpg(started.pid, signal.SIGKILL)


def test_before_training_a_signal_raises_once():
    seen = []
    stop = StopRequest()
    with pytest.raises(Stopped), stop.listening():
        try:
            send()
        finally:
            send()  # the launcher repeats it while things are put in order
            seen.append("in order")
    assert seen == ["in order"] and stop.requested
    for number in ending.SIGNALS:
        signal.signal(number, signal.default_int_handler)


class Noisy:
    """Hears of a request where what is raised goes no further."""

    def __del__(self):
        send()


def test_request_swallowed_before_training_is_raised_when_training_begins():
    handlers = {number: signal.getsignal(number) for number in ending.SIGNALS}
    with pytest.raises(Stopped), StopRequest().listening() as stop:
        Noisy()
        assert stop.requested
        stop.hold(None)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_handlers_are_put_back_if_nobody_asked():
    before = [signal.getsignal(number) for number in ending.SIGNALS]
    with StopRequest().listening():
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(number) for number in ending.SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("number", ending.SIGNALS)
def test_in_training_a_signal_waits_for_the_step(stop, number):
    assert stop.flags() == [0.0, 0.0]
    send(number)
    send(number)  # torchrun repeats a Ctrl-C of the terminal
    assert stop.flags() == [1.0, 0.0]
    assert not stop.stopping  # until all ranks know
    stop.agree([[0.0, 0.0], [1.0, 0.0]])
    assert stop.stopping and not stop.saving


def test_second_ctrl_c_interrupts(stop, monkeypatch):
    send(signal.SIGINT)
    stop._since -= 2.5  # so long ago
    send(signal.SIGTERM)  # this one repeats itself
    with pytest.raises(TrainingError, match="second Ctrl-C"):
        send(signal.SIGINT)


def test_another_ranks_wish_is_ours(stop):
    stop.agree([[0.0, 0.0], [0.0, 0.0]])
    assert not (stop.stopping or stop.saving or stop.requested)
    stop.agree([[0.0, 1.0], [0.0, 0.0]])
    assert (stop.stopping, stop.saving) == (False, True)
    stop.saved()
    assert not stop.saving
    stop.agree([[0.0, 0.0], [1.0, 0.0]])
    stop.agree([[0.0, 0.0], [0.0, 0.0]])  # one agreement is for ever
    assert stop.stopping and stop.flags() == [1.0, 0.0]


@pytest.mark.parametrize(("by_file", "by_signal"), [(1, 0), (0, 1), (1, 1)])
def test_all_ranks_know_whether_the_file_or_a_signal_stops_them(tmp_path, by_file, by_signal):
    """An elastic launch ends by the file, and goes on with other hosts after a signal."""
    ends = Ending(), Ending()
    one, other = map(StopRequest, ends)
    one.hold(tmp_path)
    other.hold(None)
    other.requested = bool(by_signal)
    if by_file:
        (tmp_path / "STOP").touch()
    for _ in range(2):  # an evaluation may ask again
        rows = [one.flags(), other.flags()]
        for request in (one, other):
            request.agree(rows)
        assert one.stopping and other.stopping
        assert [end.by_signal for end in ends] == [not by_file] * 2


def test_request_files_are_read_by_one_rank_and_removed_when_done(tmp_path, monkeypatch):
    looks = []
    stat = os.stat
    watched = {tmp_path / "STOP": "STOP", tmp_path / "SAVE": "SAVE"}

    def look(path, **more):
        if path in watched:
            looks.append(watched[path])
        return stat(path, **more)

    monkeypatch.setattr(os, "stat", look)
    one = StopRequest()
    other = StopRequest()
    one.hold(tmp_path)
    other.hold(None)

    def step():
        rows = [one.flags(), other.flags()]
        one.agree(rows)
        other.agree(rows)
        return [(request.stopping, request.saving) for request in (one, other)]

    assert step() == [(False, False)] * 2
    assert looks == ["STOP", "SAVE"]  # one stat each a step, on one rank
    (tmp_path / "SAVE").touch()
    assert step() == [(False, True)] * 2
    one.saved()
    other.saved()
    assert not list(tmp_path.iterdir())
    assert step() == [(False, False)] * 2
    (tmp_path / "STOP").touch()
    (tmp_path / "SAVE").touch()
    assert step() == [(True, True)] * 2
    assert (tmp_path / "STOP").exists()  # nothing is saved yet: whoever dies now stops next time
    one.saved()
    one.finished()
    other.finished()
    assert not list(tmp_path.iterdir())
