"""Processes that are killed, stopped, late or busy, each with a sentry: who ends, with which line.

The main thread of each waits for ever, as in a collective of NCCL; the ranks have no torch.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from parallel3d.mesh.pulse import rank as pulse
from tests.mesh.pulse.ranks import Ranks

pytestmark = pytest.mark.gloo

SHORT = {"stopped": 2.0, "silent": 4.0, "store": 1.0, "left": 2.0}
NO_FAULT = 9.0  # seconds, more than twice the longest limit
SLACK = 5.0  # seconds for processes that share two cores


def started(folder, number, does="sleep", **limits):
    ranks = Ranks(folder, number, does, **(SHORT | limits))
    ranks.wait_until_watched()
    return ranks


def sentry_of(process):
    [sentry] = psutil.Process(process.pid).children()
    return sentry


def test_one_is_killed(tmp_path):
    with started(tmp_path, 3) as ranks:
        ranks.send(signal.SIGKILL, 1)
        assert ranks.codes(SLACK) == [1, -signal.SIGKILL, 1]
        host = socket.gethostname()
        lines = [f'rank 1 on {host} died at "work 1": killed, or crashed']
        assert ranks.printed == [lines, [], []]


@pytest.mark.slow  # tests/launch/test_hangs.py has one in training
def test_stopped_rank_ends_the_run(tmp_path):
    """Its sentry ends it, too: it would hold its memory for ever."""
    with started(tmp_path, 2) as ranks:
        start = time.monotonic()
        ranks.send(signal.SIGSTOP, 0)
        assert ranks.codes(SHORT["stopped"] + SLACK) == [-signal.SIGKILL, 1]
        assert time.monotonic() - start > SHORT["stopped"] - 1  # a look
        assert "rank 0 on" in ranks.printed[1][0] and "has been stopped (SIGSTOP) for " in str(
            ranks.printed
        )


@pytest.mark.slow
@pytest.mark.parametrize("with_sentry", [False, True])
def test_killed_rank_with_the_arbiter_ends_the_run(tmp_path, with_sentry):
    with started(tmp_path, 3) as ranks:
        if with_sentry:
            time.sleep(3)  # the others have heard what it does
            sentry = sentry_of(ranks.processes[0])
            sentry.suspend()  # or it would pass its last words on
            ranks.send(signal.SIGKILL, 0)
            sentry.kill()
        else:
            ranks.send(signal.SIGKILL, 0)
        assert ranks.codes(SLACK) == [-signal.SIGKILL, 1, 1]
        assert ranks.printed[0] == ranks.printed[2] == []
        [line] = ranks.printed[1]
        assert "rank 0 on" in line and 'died at "work 0"' in line


@pytest.mark.slow
def test_rank_killed_with_its_sentry_ends_the_run(tmp_path):
    with started(tmp_path, 3) as ranks:
        sentry = sentry_of(ranks.processes[2])
        sentry.suspend()  # or it would pass its last words on
        ranks.send(signal.SIGKILL, 2)
        sentry.kill()
        assert ranks.codes(SLACK) == [1, 1, -signal.SIGKILL]
        assert (
            "rank 2 on" in ranks.printed[0][0] and "and its sentry with it" in ranks.printed[0][0]
        )


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_silent_machine_ends_the_run(tmp_path, rank):
    """As where rank and sentry are frozen together, and the others are not."""
    with started(tmp_path, 3) as ranks:
        time.sleep(3)
        sentry = sentry_of(ranks.processes[rank])
        sentry.suspend()
        ranks.send(signal.SIGSTOP, rank)
        try:
            codes = ranks.codes(SHORT["silent"] + SLACK)
        finally:
            sentry.resume()
        assert [code for r, code in enumerate(codes) if r != rank] == [1, 1]
        lines = str(ranks.printed)
        assert lines.count(f"rank {rank} on") == 1 and "has been silent for" in lines


@pytest.mark.slow
def test_lost_store_ends_the_run(tmp_path):
    with started(tmp_path, 2) as ranks:
        ranks.lose_store()
        assert ranks.codes(SLACK) == [1, 1]
        assert "is gone: its host process died" in ranks.printed[0][0]


@pytest.mark.slow
def test_one_is_late(tmp_path):
    with started(tmp_path, 3, "wait for one") as ranks:
        assert ranks.codes(5 + SLACK) == [1, 1, 1]
        assert (
            "rank 1 on" in ranks.printed[0][0]
            and 'is late: at "2F0 of step 7"' in ranks.printed[0][0]
        )


@pytest.mark.slow
def test_failure_of_one_rank_ends_the_run(tmp_path):
    with started(tmp_path, 3, "fail alone") as ranks:
        assert ranks.codes(SLACK) == [1, 1, 1]
        assert (
            "rank 1 on" in ranks.printed[0][0]
            and 'failed at "work 1": ValueError: no' in ranks.printed[0][0]
        )


def test_stop_request_of_one_rank_ends_the_run_well(tmp_path):
    with started(tmp_path, 3, "ask") as ranks:
        assert ranks.codes(SLACK) == [3, 3, 3]
        assert ranks.printed == [[f"rank 1 on {socket.gethostname()} was asked to"], [], []]


@pytest.mark.slow
def test_ranks_may_end_at_different_times(tmp_path):
    with started(tmp_path, 3, "end well") as ranks:
        sentries = [sentry_of(process) for process in ranks.processes]
        assert ranks.codes(10) == [0, 0, 0]
        assert ranks.printed == [[], [], []]
        _, alive = psutil.wait_procs(sentries, timeout=SLACK)
        assert not alive


@pytest.mark.slow
def test_rank_that_cannot_end_is_killed(tmp_path):
    """No Python runs in it; what it was to say is printed for it."""
    with started(tmp_path, 2, "hold lock") as ranks:
        ranks.send(signal.SIGKILL, 0)
        assert ranks.codes(5 + SLACK) == [-signal.SIGKILL, -signal.SIGKILL]
        assert "rank 0 on" in ranks.printed[1][0]


@pytest.mark.slow
def test_native_code_holding_the_interpreter_is_not_a_fault(tmp_path):
    with started(tmp_path, 3, "hold lock") as ranks:
        assert ranks.codes(15) == [None, None, None]
        assert ranks.printed == [[], [], []]


@pytest.mark.slow
@pytest.mark.parametrize("with_sentries", [True, False])
def test_suspended_and_continued_job_is_not_a_fault(tmp_path, with_sentries):
    """Ctrl-Z, a scheduler that suspends: all processes, or the ranks alone."""
    with started(tmp_path, 3, stopped=6.0) as ranks:  # they wake one after the other
        processes = [psutil.Process(process.pid) for process in ranks.processes]
        if with_sentries:
            processes += [sentry_of(process) for process in ranks.processes]
        for process in processes:
            process.suspend()
        time.sleep(20)
        for process in processes:
            process.resume()
            time.sleep(0.1)
        assert ranks.codes(NO_FAULT) == [None, None, None], ranks.printed
        assert ranks.printed == [[], [], []]


PTRACE_ATTACH = 16
PTRACE_DETACH = 17


@pytest.mark.slow
def test_rank_in_a_debugger_is_not_a_fault(tmp_path):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    with started(tmp_path, 2, "wait for one") as ranks:
        traced = ranks.processes[1].pid
        if libc.ptrace(PTRACE_ATTACH, traced, None, None):
            pytest.skip(f"ptrace: {os.strerror(ctypes.get_errno())}")
        time.sleep(NO_FAULT)
        assert psutil.Process(traced).status() == psutil.STATUS_TRACING_STOP
        assert ranks.printed == [[], []]  # though one waits, and is allowed 3 s
        assert libc.ptrace(PTRACE_DETACH, traced, None, None) == 0
        assert ranks.codes(3 + SLACK) == [1, 1]
        assert "rank 1 on" in ranks.printed[0][0] and "is late: " in ranks.printed[0][0]


@pytest.mark.slow
def test_strangers_are_ignored(tmp_path):
    with started(tmp_path, 2) as ranks:
        port = next(
            c.laddr.port
            for c in sentry_of(ranks.processes[0]).net_connections()
            if c.status == psutil.CONN_LISTEN
        )
        for words in (b"GET / HTTP/1.1\n\n", b'{"token": "", "rank": 1}\n', b"[1]\n", b"x" * 2**20):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                try:
                    stranger.sendall(words)
                    assert stranger.recv(1) == b""
                except ConnectionError:
                    pass
        assert ranks.codes(3) == [None, None]
        ranks.send(signal.SIGKILL, 1)
        assert ranks.codes(SLACK) == [1, -signal.SIGKILL]


def test_outcome_sent_with_the_greeting_is_read(monkeypatch):
    """As by a rank whose sentry reaches the arbiter when the run is over."""
    monkeypatch.setattr(pulse, "_page", None)
    with socket.create_server(("127.0.0.1", 0)) as arbiter:
        address = json.dumps(["secret", ["127.0.0.1"], arbiter.getsockname()[1]])
        pulse.begin(1, 2, ("127.0.0.1", 1), [], lambda text: None, lambda: address)
        pulse.leave(1)  # this process is not to be ended
        greeting = {"token": "secret", "outcome": "", "speaks": False}
        outcome = greeting | {"outcome": "it is over", "speaks": True, "blamed": False, "code": 1}
        line, _ = arbiter.accept()
        with line:
            line.sendall(f"{json.dumps(greeting)}\n{json.dumps(outcome)}\n".encode())
            heard = pulse.outcome(20)
        for child in psutil.Process().children():
            with suppress(psutil.ZombieProcess):  # another test's
                if "pulse.sentry" in " ".join(child.cmdline()):
                    child.kill()
                    child.wait()
        assert heard == ("it is over", True, 1)


ALONE = """
import os, socket, sys
from parallel3d.mesh.pulse import rank as pulse
store = socket.create_server(("127.0.0.1", 0))
pulse.begin(0, 2, store.getsockname(), ["127.0.0.1"], lambda text: None, lambda: "")
input()
"""


@pytest.mark.slow
def test_arbiter_does_not_wait_for_missing_ranks():
    """For longer than they may take to reach it; else it would outlive its launch for ever."""
    with subprocess.Popen([sys.executable, "-c", ALONE], stdin=subprocess.PIPE) as rank:
        deadline = time.monotonic() + 20
        while not (sentries := psutil.Process(rank.pid).children()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        rank.kill()
    assert psutil.wait_procs(sentries, timeout=5)[1]  # one of them might yet come
    assert not psutil.wait_procs(sentries, timeout=70)[1]
