"""A request to stop before training, to any rank: all end with exit code 3, and nothing is lost.

The ranks are started without a launcher, which would hide their exit codes and stop the others.
"""

import os
import random
import signal
import subprocess
import time

import pytest

from parallel3d.verify.local_ranks import free_port
from tests.launch.launching import PYTHON, Place, environment

pytestmark = pytest.mark.drill

STOPPED = 3
SECONDS = 8.0  # what "a few seconds" are on a machine that is busy with other tests


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A corpus that takes some twenty seconds to prepare."""
    place = Place(tmp_path_factory.mktemp("stopping"))
    words = random.Random(0)
    vocabulary = ["".join(words.choices("abcdefghijklmnop", k=6)) for _ in range(5000)]
    for i in range(6):
        block = "\n".join(" ".join(words.choices(vocabulary, k=12)) for _ in range(5000))
        (place.root / f"texts/large-{i}.txt").write_text(f"{block}\n" * 12)
    return place


class Ranks:
    """Both ranks of a run, and what they say."""

    def __init__(self, place):
        port = str(free_port())
        self.log = place.root / "log.txt"
        self.processes = []
        with self.log.open("w") as file:
            for rank in range(2):
                variables = {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
                }  # fmt: skip
                process = subprocess.Popen(
                    place.command(PYTHON), cwd=place.root, env=environment() | variables,
                    stdout=file, stderr=file,
                )  # fmt: skip
                self.processes.append(process)

    def wait_for(self, text, seconds=60):
        deadline = time.monotonic() + seconds
        while text not in self.log.read_text():
            assert all(p.poll() is None for p in self.processes), self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def codes(self, seconds):
        """The exit codes, which must be there within so many seconds."""
        deadline = time.monotonic() + seconds
        try:
            return [p.wait(max(0.0, deadline - time.monotonic())) for p in self.processes]
        finally:
            for process in self.processes:
                process.kill()
                process.wait()


# Rank 0 prepares the corpus; rank 1 waits for it.
@pytest.mark.parametrize(
    ("phase", "culprit", "number"),
    [
        ("training the tokenizer", 1, signal.SIGTERM),
        pytest.param("tokenising", 0, signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_preparation_is_stopped(place, phase, culprit, number):
    ranks = Ranks(place)
    ranks.wait_for(phase)
    os.kill(ranks.processes[culprit].pid, number)
    assert ranks.codes(SECONDS) == [STOPPED, STOPPED], ranks.log.read_text()
    said = ranks.log.read_text()
    assert said.count("stopped on request before the first step") == 1
    assert "Traceback" not in said and "another rank" not in said
