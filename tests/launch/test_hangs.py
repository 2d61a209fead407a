"""Ranks that die or are stopped while the others wait for ever: these end, and say whom they lost.

The waits here are none of gloo's, which would fail as soon as a peer dies: as under NCCL, the main
thread hears of nothing.
"""

import json
import os
import signal
import socket
import threading
import time
from functools import partial

import pytest

from parallel3d.mesh.pulse import rank as pulse
from parallel3d.mesh.pulse.arbiter import Limits
from tests.checkpoint.drill import Run, prepared_config
from tests.strict.running import STRICT

pytestmark = pytest.mark.drill

FAILED = 1
# seconds that are promised
KILLED_WITHIN = 10.0
STOPPED_WITHIN = 30.0
SHORT = Limits(stopped=1.0)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    config = prepared_config(tmp_path_factory.mktemp("hangs"))
    config["zero_optimization"]["stage"] = 1
    config["parallel3d"]["train"] |= {"evaluate_every": 2, "timeout_seconds": 600}
    config["parallel3d"]["run"]["save_weights"] = True
    return config


def strike(rank, at, number, limits, ask=False, backend=""):
    """Where rank 1 says that it does `at`, it gets a signal, and the others wait for ever.

    With a `backend` these wait in its own collectives.
    """
    pulse.LIMITS = limits
    doing = pulse.doing
    if backend == "strict":
        os.environ["PARALLEL3D_BACKEND"] = STRICT

    def do(text):
        doing(text)
        if not text.startswith(at):
            return
        if rank == 1:
            os.kill(os.getpid(), number)
        if backend:
            return
        if ask:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        time.sleep(1000)

    pulse.doing = do


def struck(config, name, at, number, limits=SHORT, mesh=(1, 2, 1), **options):
    """How the ranks of such a run ended, and the one line that they say."""
    run = Run(config, name, mesh)
    start = time.monotonic()
    ended = run.start("", partial(strike, at=at, number=number, limits=limits, **options))
    assert ended[1].code == -signal.SIGKILL, ended[1]  # a stopped rank is ended by its sentry
    others = [end for rank, end in enumerate(ended) if rank != 1]
    assert {end.code for end in others} == {FAILED}, [end.log for end in others]
    output = "".join(end.log for end in others)
    assert "Traceback" not in output and "another rank" not in output, output
    lines = [line for line in output.splitlines() if line.startswith("rank ")]
    assert len(lines) == 1 and lines[0].startswith(f"rank 1 on {socket.gethostname()} "), output
    assert lines[0].endswith("; the run ends"), lines
    waited = max(end.at for end in others) - ended[1].at
    print(f"{name}: {lines[0]!r}; {waited:.1f} s after its end, {time.monotonic() - start:.1f} s")
    return lines[0], waited


def test_rank_stopped_in_training_ends_the_run(config):
    line, waited = struck(config, "stopped", "0F1 of step 2", signal.SIGSTOP)
    assert "has been stopped (SIGSTOP) for " in line and 's at "0F1 of step 2"; ' in line
    assert waited < KILLED_WITHIN


@pytest.mark.slow
@pytest.mark.parametrize(
    "at",
    [
        "making the process groups",
        "opening the corpus",
        "building the model",
        "the batch of step 1",
        "0F0 of step 2",
        "the optimizer's step 2",
        "0F0 of an evaluation",
        "saving step 2",
        "writing the weights",
    ],
)
def test_one_is_killed(config, at):
    line, waited = struck(config, at.replace(" ", "-"), at, signal.SIGKILL)
    assert f'died at "{at}' in line and '": killed, or crashed; ' in line
    assert waited < KILLED_WITHIN


@pytest.mark.slow
def test_stop_request_while_a_rank_is_stopped(config):
    """By the limits that users have; SIGTERM changes neither the end nor its code."""
    start = time.monotonic()
    limits = Limits()
    line, waited = struck(config, "asked", "0F0 of step 1", signal.SIGSTOP, limits, ask=True)
    assert "has been stopped (SIGSTOP) for 2" in line
    assert waited < KILLED_WITHIN and time.monotonic() - start < 60


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "strict"])
@pytest.mark.parametrize("mesh", [(1, 2, 1), (2, 1, 1)], ids=["dp", "pp"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_hang_inside_the_waits_of_a_backend(config, backend, mesh, number):
    at = "1F1 of step 2" if mesh[0] == 2 else "0F1 of step 2"
    name = f"{backend}-{mesh[0]}-{number}"
    line, waited = struck(config, name, at, number, mesh=mesh, backend=backend)
    assert f'at "{at}"' in line and waited < KILLED_WITHIN


@pytest.mark.slow
def test_first_waiting_rank_of_a_pipeline_reports_the_hang(config):
    line, waited = struck(config, "pipeline", "0F1 of step 2", signal.SIGKILL, mesh=(1, 2, 2))
    assert "died" in line and waited < KILLED_WITHIN


def hang(rank, at, seconds=1000.0):
    """Where it says that it does `at`, rank 1 computes for so long."""
    doing = pulse.doing

    def do(text):
        doing(text)
        if rank == 1 and text.startswith(at):
            time.sleep(seconds)

    pulse.doing = do


@pytest.mark.slow
def test_one_is_late(config):
    """Each rank leaves what torch recorded of its collectives."""
    run = Run(config, "late", (2, 1, 1), parallel3d__train__timeout_seconds=4)
    ended = run.start("", partial(hang, at="1B1 of step 3"))
    assert [end.code for end in ended] == [FAILED, FAILED], [end.log for end in ended]
    output = ended[0].log + ended[1].log
    [line] = [line for line in output.splitlines() if line.startswith("rank ")]
    assert line.startswith(f'rank 1 on {socket.gethostname()} is late: at "1B1 of step 3" for '), (
        line
    )
    assert "; rank 0 waited (4 s are allowed)" in line
    records = [json.loads(path.read_text()) for path in sorted(run.folder.glob("flight/rank-*"))]
    assert len(records) == 2 and all(record["entries"] for record in records)


@pytest.mark.slow
@pytest.mark.parametrize("at", ["0B1 of step 3", "the optimizer's step 3"])
def test_late_rank_in_a_collective_of_deepspeed_ends_the_run(config, at):
    """The other waits where it does not say so, until gloo's own timeout ends the wait."""
    changes = {"parallel3d__train__timeout_seconds": 4, "zero_optimization__stage": 3}
    run = Run(config, f"within {at[:3]}", (1, 2, 1), **changes)
    ended = run.start("", partial(hang, at=at))
    assert [end.code for end in ended] == [FAILED, FAILED], [end.log for end in ended]
    output = "".join(end.log for end in ended)
    [line] = [line for line in output.splitlines() if line.startswith("rank ")]
    assert line.startswith(f'rank 1 on {socket.gethostname()} is late: at "{at}" for '), line
    assert "; rank 0 waited (4 s are allowed)" in line


@pytest.mark.slow
def test_without_a_limit_nobody_is_late(config):
    """What one sets who holds a rank in pdb: 0 is no second, and no collective's own limit."""
    run = Run(config, "held", (1, 2, 1), parallel3d__train__timeout_seconds=0)
    ended = run.start("", partial(hang, at="0B1 of step 3", seconds=5.0))
    assert [end.code for end in ended] == [0, 0], [end.log for end in ended]


@pytest.mark.slow
def test_exception_of_one_rank_is_reported(config):
    run = Run(config, "raises", (1, 2, 1))
    ended = run.start("", stumble)
    assert [end.code for end in ended] == [FAILED, FAILED], [end.log for end in ended]
    assert "Traceback" in ended[1].log and "ZeroDivisionError" in ended[1].log
    [line] = [line for line in ended[0].log.splitlines() if line.startswith("rank ")]
    assert (
        "rank 1 on" in line
        and 'failed at "0F1 of step 2": ZeroDivisionError: division by zero; ' in line
    )


def stumble(rank):
    doing = pulse.doing

    def do(text):
        doing(text)
        if text.startswith("0F1 of step 2"):
            _ = 1 / (rank - 1) if rank == 1 else time.sleep(1000)

    pulse.doing = do
