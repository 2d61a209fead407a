"""A ladder's runs as processes, with a stand-in for training: order, failures, stops."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from launch import scale
from parallel3d.base.errors import ConfigError
from parallel3d.extras.scaling.ladder import runner
from parallel3d.extras.scaling.ladder.plan import ladder_of, show, state_of
from parallel3d.extras.scaling.ladder.runner import Display, Process, execute
from parallel3d.extras.scaling.runs import read_runs
from tests.scaling.ladder.cases import micro, write

pytestmark = pytest.mark.drill

NAMES = ["2.59k-d512", "2.59k-d1.02k", "10.3k-d512", "10.3k-d1.02k"]


def without_fork(command, preexec_fn, **options):
    """Start a process that would outlive a killed parent: to fork the tests' own takes long."""
    return subprocess.Popen(command, **options)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where a ladder's runs are stand-ins."""
    processes = SimpleNamespace(**vars(subprocess) | {"Popen": without_fork})
    monkeypatch.setattr(runner, "subprocess", processes)
    for name in ("train.py", "prepare.py"):
        shutil.copy(Path(__file__).with_name("stand_in.py"), tmp_path / name)
    monkeypatch.setattr(runner, "TRAIN", tmp_path / "train.py")
    monkeypatch.setattr(runner, "_POLL_SECONDS", 0.02)  # a stand-in is done in a moment
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "runs").mkdir()
    return tmp_path


def run(file, parallel=2):
    """The exit code, the rows' states, and what was printed."""
    out = Console(file=(file.parent / "output.txt").open("w"), width=300)
    code, ladder = execute(lambda: ladder_of(str(file)), parallel, out)
    out.file.close()
    states = {rung.run.name: rung.state.name for rung in ladder.rungs}
    return code, states, (file.parent / "output.txt").read_text()


def printed_plan(ladder):
    out = Console(file=StringIO(), width=300)
    show(ladder, out)
    return out.file.getvalue()


def started(place):
    return [json.loads(line) for line in (place / "runs/started").read_text().splitlines()]


def test_second_start_of_a_finished_ladder_does_nothing(place):
    file = write(place)
    code, states, printed = run(file)
    assert code == 0 and states == dict.fromkeys(NAMES, "finished"), printed
    lines = started(place)
    assert sorted(line[0] for line in lines) == sorted(NAMES)
    assert {line[1] for line in lines} == {"auto"}
    assert {line[2] for line in lines} == {str(max(1, os.cpu_count() // 2))}
    assert "held-out loss" in printed
    corpus = json.loads((place / "runs/corpus.json").read_text())
    assert corpus["training_tokens"] == 10_000
    assert run(file)[:2] == (0, states) and started(place) == lines


def test_tuning_runs_come_first_and_set_the_others(place):
    tune = {"learning_rate_factors": [0.5, 1, 2]}
    hyperparameters = {"learning_rate": 0.01, "batch_tokens": 64, "tune": tune}
    changes = {"budgets": {"tokens": [1920, 3840, 7680]}, "hyperparameters": hyperparameters}
    file = write(place, **changes)
    assert ladder_of(str(file)).is_tuned is False
    code, states, printed = run(file)
    assert code == 0 and set(states.values()) == {"finished"}, printed
    names = [line[0] for line in started(place)]
    assert len(names) == 10 + 6 and all("-rate" in name for name in names[:10])
    assert {name.split("-rate")[0] for name in names[:10]} == {"10.3k-d1.92k", "10.3k-d3.84k"}
    ladder = ladder_of(str(file))
    assert ladder.is_tuned and "rate and batch times 0.8 and 0.75" in printed_plan(ladder)
    for rung in ladder.rungs:
        if rung.run.kind == "fit":
            assert rung.run.batch_tokens == 48
            assert rung.run.config.optimizer.params.lr == pytest.approx(0.008, rel=1e-3)
    assert len(read_runs(place / "runs").rows) == 6, "the law is not fitted to runs that tune"
    assert run(file)[0] == 0 and len(started(place)) == 16


@pytest.mark.slow  # by default tests/scaling/ladder/test_tuning.py, without processes
def test_best_rate_at_the_edge_stops_the_ladder(place):
    hyperparameters = {"learning_rate": 0.1, "batch_tokens": 64, "tune": {}}
    file = write(place, hyperparameters=hyperparameters, budgets={"tokens": [1920, 3840]})
    with pytest.raises(ConfigError, match="the best one must have others on both sides"):
        run(file)
    assert len(started(place)) == 14
    tune = {"learning_rate_factors": [0.03125, 0.0625, 0.125, 0.25, 0.5, 1, 2, 4]}
    changed = hyperparameters | {"tune": tune}
    assert run(write(place, hyperparameters=changed, budgets={"tokens": [1920, 3840]}))[0] == 0
    assert len(started(place)) == 14 + 6 + 4, "the first ones are not trained again"


def test_failed_run_is_named_and_others_continue(place):
    (place / f"runs/{NAMES[2]}.fails").touch()
    code, states, printed = run(write(place))
    assert code == 1
    assert states == {name: "unfinished" if name == NAMES[2] else "finished" for name in NAMES}
    line = f"{NAMES[2]}: FAILED: exit code 1: train: the loss on rank 0 is nan; see "
    assert line in " ".join(printed.split())
    (place / f"runs/{NAMES[2]}.fails").unlink()
    assert run(write(place))[:2] == (0, dict.fromkeys(NAMES, "finished"))
    assert len(started(place)) == 5


def test_stop_request_stops_all_runs_and_the_next_start_resumes(place):
    for name in NAMES[2:]:  # the longest are the first
        (place / f"runs/{name}.waits").touch()

    def ask():
        while len(list((place / "runs").glob("*/metrics.jsonl"))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    asker = threading.Thread(target=ask)
    asker.start()
    before = signal.getsignal(signal.SIGTERM)
    code, states, printed = run(write(place))
    asker.join()
    assert code == 3 and signal.getsignal(signal.SIGTERM) == before
    assert "stopping 2 runs" in printed and "stopped on request" in printed
    assert sorted(states.values()) == ["new", "new", "unfinished", "unfinished"]
    for name in NAMES[2:]:
        (place / f"runs/{name}.waits").unlink()
    assert run(write(place))[:2] == (0, dict.fromkeys(NAMES, "finished"))
    assert len(started(place)) == 6


def test_forks_start_from_checkpoints_of_their_trunk(place):
    file = write(place, schedule={"type": "forks"}, budgets={"tokens": [3200, 6400]})
    code, states, printed = run(file)
    assert code == 0 and set(states.values()) == {"finished"}, printed
    times = {line[0]: line[4] for line in started(place)}
    for rung in ladder_of(str(file)).rungs:
        if rung.run.trunk:
            assert times[rung.run.trunk] < times[rung.run.name]
            resume = next(line[1] for line in started(place) if line[0] == rung.run.name)
            assert resume == str(rung.run.config.checkpoint.resume)
            assert rung.run.folder.parent == place / "runs"
        else:  # where no fit of the folder looks for points
            assert rung.run.folder.parent == place / "runs/trunks"
            assert rung.state.name == "finished" and rung.state.loss is None
            first = rung.run.folder / f"checkpoints/step-{rung.run.config.checkpoint.at[0]}"
            shutil.rmtree(first)  # a save that a kill has prevented
            assert state_of(rung.run).name == "unfinished"
    # A fork whose own checkpoints are there goes on with the newest of these, and with no other:
    # "auto" would pass over a damaged one, and begin at step 0, without its trunk.
    fork = next(r.run for r in ladder_of(str(file)).rungs if r.run.trunk)
    text = (fork.folder / "metrics.jsonl").read_text().splitlines()[0]
    own = fork.folder / "checkpoints"
    for name in ("step-9", f"step-{fork.steps}.rejected"):
        (own / name).mkdir()
        (own / name / "manifest.json").touch()
    trunk = str(fork.config.checkpoint.resume)
    for resume, gone in ((f"{fork.steps}", "step-*"), (trunk, "")):
        (fork.folder / "metrics.jsonl").write_text(f"{text}\n")
        assert run(file)[0] == 0
        # Its unfinished trunk may start before or after it.
        assert [line[1] for line in started(place) if line[0] == fork.name][-1] == resume
        for path in own.glob(gone) if gone else ():
            if not path.name.endswith(".rejected"):
                shutil.rmtree(path)


@pytest.mark.slow  # by default the two tests beside it: forks wait for trunks, runs fail
def test_failed_trunk_fails_its_forks(place):
    file = write(place, schedule={"type": "forks"}, budgets={"tokens": [3200, 6400]})
    trunk = next(r.run.name for r in ladder_of(str(file)).rungs if r.run.kind == "trunk")
    (place / f"runs/{trunk}.fails").touch()
    code, states, printed = run(file)
    assert code == 1
    assert printed.count(f"its trunk {trunk} did not finish") == 2
    assert sum(state == "finished" for state in states.values()) == 3


SIZES = [{"model": {"hidden_size": h, "num_hidden_layers": 1}} for h in (16, 32, 64)]
HELD = [{"size": {"model": {"hidden_size": 96, "num_hidden_layers": 1}}, "tokens": 64000}]


@pytest.mark.slow  # by default one whose forecast cannot be registered
def test_held_out_run_is_not_started_after_a_failure(place):
    file = write(place, sizes=SIZES, budgets={"tokens": [640, 1280, 2560]}, held_out=HELD)
    (place / "runs/2.59k-d640.fails").touch()
    code, states, printed = run(file)
    held = next(name for name in states if name.startswith("held-out"))
    assert code == 1 and states[held] == "new"
    assert "its forecast: it needs the failed runs 2.59k-d640" in " ".join(printed.split())


@pytest.mark.slow  # the fit takes half a minute; tests/scaling/test_forecast.py registers others
def test_held_out_run_starts_after_its_forecast_is_registered(place, monkeypatch):
    pytest.importorskip("scipy")
    monkeypatch.setattr(runner, "DRAWS", 20)
    file = write(place, sizes=SIZES, budgets={"tokens": [640, 1280, 2560]}, held_out=HELD)
    code, states, printed = run(file)
    assert code == 0 and set(states.values()) == {"finished"}, printed
    (forecast_file,) = (place / "runs").glob("forecast-held-out-*.json")
    forecast = json.loads(forecast_file.read_text())
    ladder = ladder_of(str(file))
    held_run = next(rung.run for rung in ladder.rungs if rung.run.kind == "held-out")
    assert forecast["params"] == held_run.counts.with_head and forecast["tokens"] == held_run.tokens
    assert forecast["points"] == 9
    assert forecast_file.stat().st_mtime <= held_run.folder.stat().st_mtime
    assert runner.register(ladder, held_run) is None  # never again


def test_held_out_run_without_a_forecast_is_not_started(place):
    code, states, printed = run(write(place, held_out=HELD))
    assert code == 1
    assert sorted(states.values()) == ["finished"] * 4 + ["new"]
    assert "cannot register its forecast: " in " ".join(printed.split())


def test_run_still_saving_after_a_kill_is_waited_for(place):
    """The longest one, which would be the first."""
    file = write(place)
    (*others, held) = NAMES
    lock = runner.Lock(place / "runs" / f"{held}.lock")
    lock.take()

    def release():
        while not all((place / "runs" / name / "metrics.jsonl").exists() for name in others):
            time.sleep(0.02)
        assert not (place / "runs" / held).exists()
        lock.release()

    releaser = threading.Thread(target=release)
    releaser.start()
    code, states, printed = run(file)
    releaser.join()
    assert code == 0 and set(states.values()) == {"finished"}
    assert started(place)[-1][0] == held
    assert printed.count(f"{held}: waiting for process {os.getpid()}") == 1


def test_devices_are_divided_among_runs(place, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert run(write(place))[0] == 0
    assert {line[3] for line in started(place)} == {"4", "7"}
    (place / "other").mkdir()
    with pytest.raises(ConfigError, match="for 4 devices, but 2 are visible"):
        run(write(place / "other", mesh={"dp": 4}))


def test_finished_run_is_known_by_its_rate_and_not_by_its_mesh(place):
    file = write(place)
    assert run(file)[0] == 0
    base = micro(place)["base"]
    base["zero_optimization"] = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    other = ladder_of(str(write(place, base=base, mesh={"pp": 1, "dp": 2, "tp": 1})))
    assert {rung.state.name for rung in other.rungs} == {"finished"}
    changed = {"learning_rate": 0.02, "batch_tokens": 64}
    with pytest.raises(ConfigError, match=r"optimizer.params.lr: 0.01 -> 0.02\); remove it"):
        ladder_of(str(write(place, hyperparameters=changed)))


def test_ladder_is_locked_while_it_runs(place):
    file = write(place)
    lock = runner.Lock(place / "runs" / runner.LOCK)
    lock.take()
    try:
        with pytest.raises(
            ConfigError, match=r"is already being run by .*; wait for it to end, or"
        ):
            run(file)
    finally:
        lock.release()
    assert run(file)[0] == 0


def test_mesh_is_smaller_where_devices_are_too_few(place, monkeypatch):
    monkeypatch.setattr(runner, "visible_devices", lambda: ("0",))

    def runner_of(**changes):
        ladder = ladder_of(str(write(place, **changes)))
        return runner.Runner(ladder, 1, Display(Console(file=StringIO()), len(ladder.rungs), 0))

    with pytest.raises(ConfigError, match="use a smaller mesh, or --emit slurm"):
        runner_of(mesh={"pp": 1, "dp": 2, "tp": 1})
    assert runner_of(mesh={"pp": 1, "dp": 1, "tp": 1})


def test_half_written_folder_is_completed(place):
    file = write(place)
    assert run(file)[0] == 0
    (one, *_) = (rung.run for rung in ladder_of(str(file)).rungs)
    with (one.folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 9')
    assert state_of(one).name == "finished"
    (one.folder / "metrics.jsonl").write_text("")
    assert state_of(one).name == "unfinished"
    (one.folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json: cannot be used .*; remove it"):
        state_of(one)


def test_commands_print_one_object_with_the_same_keys(place, monkeypatch, capsys):
    def scaled(*arguments):
        monkeypatch.setattr(sys, "argv", ["scale.py", *map(str, arguments), "--json"])
        code = scale.main()
        out, printed = capsys.readouterr()
        return code, json.loads(out), printed

    file = write(place)
    before = scaled("plan", "--ladder", file)
    emitted = scaled("run", "--ladder", file, "--emit", "slurm")
    assert emitted[:2] == before[:2] and "submit with" in emitted[2]
    assert not (place / "runs/started").exists()
    code, after, printed = scaled("run", "--ladder", file, "--parallel", 3)
    assert (before[0], code) == (0, 0) and printed.count(": started") == 4
    assert [row.keys() for row in after["runs"]] == [row.keys() for row in before[1]["runs"]]
    changed = {"state", "loss", "standard_error", "repeats"}
    for was, now in zip(before[1]["runs"], after["runs"], strict=True):
        assert {key for key in now if now[key] != was[key]} == changed
        assert (was["state"], now["state"], now["standard_error"]) == ("new", "finished", 0.01)
    assert after["total"]["finished"] == 4
    (place / "runs" / f"{NAMES[0]}.fails").touch()
    shutil.rmtree(place / "runs" / NAMES[0])
    assert scaled("run", "--ladder", file)[0] == 1


def test_terminal_shows_progress_bars(place, monkeypatch):
    """The runs that train, each with its steps and its loss, and all of them."""
    monkeypatch.setenv("TERM", "xterm-256color")
    file = write(place)
    assert run(file)[0] == 0
    one = ladder_of(str(file)).rungs[0].run
    lines = (one.folder / "metrics.jsonl").read_text().splitlines()
    (one.folder / "metrics.jsonl").write_text(f"{lines[0]}\n")
    printed = StringIO()
    with Display(Console(file=printed, force_terminal=True, width=100), 4, 3) as display:
        bar = display.add_task(one.name, total=one.steps, loss="")
        display.update_bars([Process(one, None, place / "log", (), bar)])
        display.refresh()
        during = printed.getvalue()
    assert one.name in during and f"1/{one.steps}" in during and "loss " in during
    assert "3/4" in during


def test_devices_are_numbered_as_by_cuda(tmp_path, monkeypatch):
    """In a container that has the host's GPUs 3 and 10 alone, they are 0 and 1."""
    for name in ("nvidia3", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(runner, "_NODES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert runner.visible_devices() == ("0", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert runner.visible_devices() == ("4", "7")
    for variable in ("-1", ""):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
        assert runner.visible_devices() == (), variable
