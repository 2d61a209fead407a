"""Stopped or killed runs go on by the same command, through the real launchers.

What the launchers exit with is their own affair; what they leave behind is ours.
"""

import subprocess
import time

import psutil
import pytest

from tests.launch.launching import Place, deepspeed, environment, session, torchrun, wait_until_gone

pytestmark = pytest.mark.drill

DONE = 0
FAILED = 1
STOPPED = 3
# Steps of a few hundredths of a second.
SMALL = (
    "--parallel3d.model.hidden_size",
    32,
    "--parallel3d.model.num_hidden_layers",
    2,
    "--parallel3d.data.sequence_length",
    32,
    "--parallel3d.train.evaluate_samples",
    4,
    "--zero_optimization.stage",
    1,
    "--zero_optimization.offload_optimizer.device",
    "none",
    "--parallel3d.run.save_weights",
    "false",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # the ranks share two cores
        yield Place(tmp_path_factory.mktemp("restart"))


def begin(place, launcher, *arguments, steps):
    """Start it in a session of its own; gives the process and its log."""
    log = place.root / "log.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            place.command(launcher, *SMALL, *arguments, steps=steps),
            cwd=place.root,
            env=environment(),
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    return process, log


def wait_for(condition, process, log, seconds=120):
    """Until it holds, while the run goes on."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


def finish(process, log, seconds=120):
    """Its exit code; nothing of it is left."""
    try:
        return process.wait(seconds)
    finally:
        for left in session(process.pid):
            left.kill()
        process.wait()
        print(log.read_text()[-6000:])


def steps_of(place, name):
    return [line["step"] for line in place.lines(name)]


def is_saved(place, name, step):
    return (place.root / "runs" / name / f"checkpoints/step-{step}/manifest.json").exists()


@pytest.mark.slow  # by default tests/checkpoint/test_kill.py starts processes without a launcher
@pytest.mark.parametrize("ranks", [1, 2])
def test_torchrun_restarts_killed_ranks(place, ranks):
    """Without a name: the restarted ranks find the folder of their own launch again."""
    name = f"gpt-h32-l2-1x{ranks}x1"
    steps = 20
    (place.root / "runs" / name).mkdir(parents=True)  # another run has had the name
    launcher = [*torchrun(ranks), "--max-restarts=3"]
    process, log = begin(place, launcher, "--parallel3d.checkpoint.every", 4, steps=steps)
    wait_for(lambda: is_saved(place, f"{name}-2", 8), process, log)
    children = {int(p.environ()["RANK"]): p for p in psutil.Process(process.pid).children()}
    children[ranks - 1].kill()
    assert finish(process, log) == DONE
    assert f"resume  from runs/{name}-2/checkpoints/step-" in log.read_text()
    assert steps_of(place, f"{name}-2") == list(range(1, steps + 1))
    assert is_saved(place, f"{name}-2", steps)
    folders = {path.name for path in (place.root / "runs").iterdir()}
    assert {x for x in folders if x.startswith(name)} == {name, f"{name}-2"}


@pytest.mark.slow  # by default tests/train/test_stopping.py has processes in place of the launcher
@pytest.mark.parametrize("ranks", [1, 2])
def test_end_of_the_deepspeed_command_stops_the_run(place, ranks):
    """The command dies of a SIGTERM and tells nobody; the ranks see that it is gone."""
    name = f"orphans-{ranks}"
    arguments = ("--parallel3d.run.name", name, "--parallel3d.checkpoint.every", 0)
    process, log = begin(place, deepspeed(ranks), *arguments, steps=4000)
    folder = place.root / "runs" / name
    wait_for(lambda: len(place.lines(name)) >= 2, process, log)
    (folder / "SAVE").touch()  # and a checkpoint that is asked for on the way
    wait_for(lambda: list(folder.glob("checkpoints/step-*/manifest.json")), process, log)
    assert not (folder / "SAVE").exists()
    start = time.monotonic()
    process.terminate()
    try:
        wait_until_gone(process.pid, seconds=60)
    finally:
        finish(process, log)
    assert time.monotonic() - start < 60
    steps = steps_of(place, name)
    assert steps == list(range(1, len(steps) + 1)) and len(steps) < 4000
    assert is_saved(place, name, len(steps))
    assert f"stopped on request after step {len(steps)}" in log.read_text()


@pytest.mark.slow
def test_run_that_fails_at_the_same_step_is_given_up(place, monkeypatch):
    monkeypatch.setenv("PARALLEL3D_FAULT", "kill trainer.step 5 0")
    arguments = ("--parallel3d.run.name", "doomed", "--parallel3d.checkpoint.every", 0)
    launcher = [*torchrun(1), "--max-restarts=3"]  # the fourth attempt is refused
    process, log = begin(place, launcher, *arguments, steps=20)
    assert finish(process, log, seconds=180) == FAILED
    output = log.read_text()
    assert output.count("the last 3 attempts at this run all failed after step 4, in step 5") == 1
    assert steps_of(place, "doomed") == [1, 2, 3, 4]
