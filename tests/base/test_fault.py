"""Fault points: nothing when unset, else exactly what was asked for, on one rank."""

import errno
import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gloo  # it starts processes

# Passes points as a process of rank 1 does; says each, and what happened there.
PROGRAM = """
import sys
from parallel3d.base import fault
fault.set_rank(1)
for name in sys.argv[1:]:
    try:
        fault.fault_point(name)
        print(name, flush=True)
    except OSError as error:
        print(name, error.errno, flush=True)
"""


def passed(fault, *names):
    """Return the exit code and the output lines of a process that passes these points."""
    env = {key: value for key, value in os.environ.items() if key != "PARALLEL3D_FAULT"}
    if fault is not None:
        env["PARALLEL3D_FAULT"] = fault
    command = [sys.executable, "-c", PROGRAM, *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == -signal.SIGKILL or not done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


FULL = str(errno.ENOSPC)


@pytest.mark.parametrize(
    ("fault", "code", "lines"),
    [
        (None, 0, ["a", "b", "a", "a"]),
        ("kill a 2 1", -9, ["a", "b"]),
        ("kill * 4 1", -9, ["a", "b", "a"]),
        ("kill b 2 1", 0, ["a", "b", "a", "a"]),
        ("kill a 1 0", 0, ["a", "b", "a", "a"]),
        ("full a 2 1", 0, ["a", "b", f"a {FULL}", f"a {FULL}"]),
        ("full * 3 1", 0, ["a", "b", f"a {FULL}", f"a {FULL}"]),
        ("full a 1 2", 0, ["a", "b", "a", "a"]),
    ],
)
def test_fault_happens_at_the_requested_point(fault, code, lines):
    assert passed(fault, "a", "b", "a", "a") == (code, lines)


def test_record_lists_points_of_each_rank(tmp_path):
    assert passed(f"record {tmp_path}/points", "a", "b", "a") == (0, ["a", "b", "a"])
    assert os.listdir(tmp_path) == ["points-1"]
    assert (tmp_path / "points-1").read_text().split() == ["a", "b", "a"]
