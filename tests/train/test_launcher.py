"""Ranks whose launcher is killed end by themselves, at every stage of the start."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import suppress

import psutil
import pytest

from parallel3d.base.errors import TrainingError
from parallel3d.mesh import join
from parallel3d.mesh.launch import Launch

pytestmark = pytest.mark.gloo

RANK = """
    import sys, time
    from parallel3d.train.ending import end_with

    def command(end, stop):
        print("started", flush=True)
        time.sleep(60)

    end_with(command)
"""
LAUNCHER = """
    import os, subprocess, sys
    rank = subprocess.Popen([sys.executable, {rank!r}])
    print(rank.pid, flush=True)
    rank.wait()
"""


def has_ended(process):
    """True as soon as a process is gone, or an orphan's remains; False after 15 s."""
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        with suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.05)
                continue
        return True
    return False


@pytest.fixture
def launched(tmp_path):
    """Start a rank by a launcher of a name; return both processes."""
    started = []

    def launch(name, environment=()):
        rank = tmp_path / "rank.py"
        rank.write_text(textwrap.dedent(RANK))
        script = tmp_path / name
        script.write_text(textwrap.dedent(LAUNCHER).format(rank=str(rank)))
        launcher = subprocess.Popen(
            [sys.executable, str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **dict(environment)},
        )
        process = psutil.Process(int(launcher.stdout.readline()))
        started.extend([launcher, process])
        return launcher, process

    yield launch
    for process in started:
        with suppress(psutil.Error):
            process.kill()


@pytest.mark.parametrize("name", [pytest.param("torchrun", marks=pytest.mark.slow), "mpirun"])
def test_rank_ends_when_its_launcher_is_killed(launched, name):
    launcher, rank = launched(name)
    assert launcher.stdout.readline() == "started\n"
    launcher.kill()
    launcher.wait()
    assert has_ended(rank)


def test_rank_whose_launcher_died_before_it_looked_ends(launched):
    launcher, rank = launched("torchrun", {"TORCHELASTIC_RUN_ID": "none"})
    rank.suspend()
    launcher.kill()
    launcher.wait()
    rank.resume()
    assert has_ended(rank)


def test_rank_outlives_script_that_starts_it(launched):
    launcher, rank = launched("start_all.py")
    assert launcher.stdout.readline() == "started\n"
    launcher.kill()
    launcher.wait()
    time.sleep(0.3)
    assert rank.is_running()
    rank.send_signal(signal.SIGTERM)
    assert has_ended(rank)


def test_store_of_a_dead_torchrun_is_an_error_within_seconds(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(join, "_STORE_SECONDS", 0.3)
    monkeypatch.setattr(join, "_store", None)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(TrainingError, match=f"store at 127.0.0.1:{port} refuses connections"):
        join.meet(Launch(1, 2, 1, 2), join.STARTUP_TIMEOUT)
