"""Runs on devices whose ranks are killed and stopped, and started again by the same command.

No launcher stands above the ranks here, as under plain `srun`: torchrun and deepspeed would end the
others themselves.
"""

import os
import signal
import subprocess
import time
from contextlib import contextmanager, suppress

import pytest

from parallel3d.verify.local_ranks import free_port
from tests.gpu import here
from tests.launch.launching import PYTHON, Place, environment
from tests.launch.test_restart import SMALL, is_saved, steps_of

pytestmark = pytest.mark.gpu

RANKS = min(2, here.RANKS)
WITHIN = {signal.SIGKILL: 10, signal.SIGSTOP: 30}  # seconds until every other rank has ended


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("faults"))


@contextmanager
def ranks_of(place, *arguments, steps):
    """A process a rank, and the log that they share; whatever is left at the end is killed."""
    command = place.command(PYTHON, *SMALL, *arguments, steps=steps)
    world = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
    world |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    log = place.root / "log.txt"
    with log.open("w") as file:
        ranks = [
            subprocess.Popen(
                command, cwd=place.root, stdout=file, stderr=file,
                env=environment() | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(RANKS)
        ]  # fmt: skip
    try:
        yield ranks, log
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def wait_for(condition, ranks, log, seconds=200):
    deadline = time.monotonic() + seconds
    while not condition():
        assert all(rank.poll() is None for rank in ranks), log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.02)


@pytest.mark.parametrize("blow", WITHIN, ids=lambda s: s.name)
def test_a_lost_rank_is_named_and_the_run_goes_on(place, blow):
    """The others end in time and say who it was; the same command goes on from what was saved."""
    name = f"run-{blow.name}"
    arguments = (
        "--parallel3d.mesh.pp", RANKS, "--parallel3d.checkpoint.every", 10,
        "--parallel3d.run.name", name,
    )  # fmt: skip
    with ranks_of(place, *arguments, steps=4000) as (ranks, log):
        wait_for(lambda: is_saved(place, name, 10), ranks, log)
        os.kill(ranks[-1].pid, blow)
        start = time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            for rank in ranks[:-1]:
                rank.wait(timeout=max(0, start + WITHIN[blow] + 60 - time.monotonic()))
        seconds = time.monotonic() - start
    said = log.read_text()[-3000:]
    here.report(f"{blow.name} of a rank that trains: all others end after", f"{seconds:.1f} s")
    assert seconds < WITHIN[blow], said
    assert all(rank.returncode == 1 for rank in ranks[:-1]), said
    assert f"rank {RANKS - 1}" in said
    last = max(steps_of(place, name)) + 5
    with ranks_of(place, *arguments, steps=last) as (ranks, log):
        for rank in ranks:
            rank.wait(timeout=200)
    assert [rank.returncode for rank in ranks] == [0] * RANKS, log.read_text()[-3000:]
    assert "resume  from" in log.read_text()
    assert steps_of(place, name) == list(range(1, last + 1))
