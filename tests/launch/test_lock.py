"""Launches that want one run at once: processes of the real command."""

import os
import re
import signal
import time

import pytest

from tests.launch.launching import Place, session
from tests.launch.test_restart import SMALL

pytestmark = pytest.mark.drill

BAD_INPUT = 2
STOPPED = 3


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def start(place, number, name="shared", steps=4000):
    """So many at once; each with a file of what it says."""
    named = ("--parallel3d.run.name", name, "--parallel3d.checkpoint.every", 2)
    before = len(list(place.root.glob("log-*.txt")))  # two that write to one file lose lines
    logs = [place.root / f"log-{before + i}.txt" for i in range(number)]
    return [(place.forked(log, *SMALL, *named, steps=steps), log) for log in logs]


def end(started):
    for process, _ in started:
        for left in session(process.pid):
            left.kill()
        process.kill()  # it may not have a session yet
        process.join()


def wait_until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def the_one(place, started):
    """Who trains, when all others have ended as they should."""
    wait_until(lambda: len([p for p, _ in started if p.exitcode is None]) == 1)
    [(winner, _)] = [(p, log) for p, log in started if p.exitcode is None]
    for process, log in started:
        output = log.read_text()
        if process is not winner:
            assert process.exitcode == BAD_INPUT, output
            assert re.search(rf"being trained by process {winner.pid} on ", output), output
            assert "Traceback" not in output and output.count("\n") == 1
    wait_until(lambda: list(place.root.glob("runs/*/checkpoints/step-*[0-9]/manifest.json")))
    return winner


# The first guarantee of "nothing lost" that real processes alone can show.
@pytest.mark.parametrize(
    ("name", "number"),
    [("shared", 2), *(pytest.param(n, 8, marks=pytest.mark.slow) for n in ("shared", "auto"))],
)
def test_one_of_many_launches_trains_and_after_its_death_the_next(place, name, number):
    first = start(place, number, name=name)
    try:
        os.kill(the_one(place, first).pid, signal.SIGKILL)
        second = start(place, min(2, number - 1), name=name)
        try:
            [folder] = [path for path in (place.root / "runs").iterdir() if path.is_dir()]
            winner = the_one(place, second)
            (folder / "STOP").touch()
            winner.join(60)
            assert winner.exitcode == STOPPED
        finally:
            end(second)
    finally:
        end(first)
    output = "".join(log.read_text() for _, log in second)
    assert "resume  from" in output, output
    steps = [line["step"] for line in place.lines(folder.name)]
    assert steps == list(range(1, len(steps) + 1))  # no line is lost, and none is there twice
    assert [path.name for path in (place.root / "runs").iterdir()] == [folder.name]
