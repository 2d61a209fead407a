"""A request to stop before training, to any rank: all end with exit code 3, and nothing is lost.

The ranks have no launcher, which would hide their exit codes and stop the others.
"""

import os
import random
import signal
import time

import pytest

from parallel3d.verify.local_ranks import free_port
from tests.launch.launching import Place

pytestmark = pytest.mark.drill

STOPPED = 3
SECONDS = 8.0  # "a few seconds", on a machine that is busy with other tests


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A corpus that takes some ten seconds to prepare."""
    place = Place(tmp_path_factory.mktemp("stopping"))
    words = random.Random(0)
    vocabulary = ["".join(words.choices("abcdefghijklmnop", k=6)) for _ in range(5000)]
    for i in range(3):
        block = "\n".join(" ".join(words.choices(vocabulary, k=12)) for _ in range(5000))
        (place.root / f"texts/large-{i}.txt").write_text(f"{block}\n" * 8)
    return place


class Ranks:
    """Both ranks of a run, and what they say."""

    def __init__(self, place):
        port = str(free_port())
        self.logs = [place.root / f"log-{rank}.txt" for rank in range(2)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
            }
            self.processes.append(place.forked(log, variables=variables))

    @property
    def output(self):
        return "".join(log.read_text() for log in self.logs if log.exists())

    def wait_for(self, text, seconds=60):
        deadline = time.monotonic() + seconds
        while text not in self.output:
            assert all(p.exitcode is None for p in self.processes), self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)

    def codes(self, seconds):
        """The exit codes, which must be there within so many seconds."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        return codes


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
    assert ranks.codes(SECONDS) == [STOPPED, STOPPED], ranks.output
    output = ranks.output
    assert output.count("stopped on request before the first step") == 1
    assert "Traceback" not in output and "another rank" not in output
