"""The end of a launch: exit codes under each launcher, and the command that resumes it."""

import importlib
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest

from parallel3d.base.errors import ConfigError
from parallel3d.mesh.launch import Launch
from parallel3d.train import ending
from parallel3d.train.ending import StopRequest

pytestmark = pytest.mark.gloo

TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RESTART_COUNT": "1",
}
DEEPSPEED = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_SIZE": "2",
    "CROSS_RANK": "0",
}
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "1",
    "MASTER_ADDR": "node1",
    "SLURM_JOB_ID": "77",
    "SLURM_RESTART_COUNT": "2",
}
STOP = "stopped on request (exit code 3)"
AFTER = "what follows is"
REPORT = "'s own report of it"
ALL = {name for variables in (TORCHRUN, DEEPSPEED, SLURM) for name in variables}


@pytest.fixture
def launch_of(monkeypatch):
    def launch_of(variables):
        for name in ALL:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return Launch.from_environment()

    return launch_of


def test_rank_0_is_not_cut_off_when_others_have_ended(monkeypatch):
    def others_end_first(launch, speak, error):
        speak()
        os.kill(os.getpid(), signal.SIGTERM)  # torchrun and deepspeed do, at the first that ends

    monkeypatch.setattr("parallel3d.mesh.join.rank_0_first", others_end_first)
    if not (child := os.fork()):
        end = ending.Ending()
        end.launch = Launch(0, 2, 0, 2)
        end.on_shared_error(ConfigError("no such key"))
        os._exit(ending.BAD_INPUT)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == ending.BAD_INPUT


@pytest.mark.parametrize(
    ("variables", "code", "ends_with", "says"),
    [
        ({}, 3, 3, ""),
        ({}, 2, 2, ""),
        (SLURM, 3, 3, ""),
        (TORCHRUN, 3, 0, "stopped on request (exit code 3)"),
        (TORCHRUN, 1, 1, "the run failed (exit code 1)"),
        (TORCHRUN, 0, 0, ""),
        (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "3"}, 3, 3, f"{STOP}; {AFTER} torchrun{REPORT}"),
        (DEEPSPEED, 3, 3, f"{STOP}; {AFTER} deepspeed{REPORT}"),
        (DEEPSPEED, 2, 2, "bad config or input: do not retry (exit code 2)"),
    ],
)
def test_codes_and_last_lines(launch_of, variables, code, ends_with, says):
    launch = launch_of(variables)
    assert (ending.exit_code(code, launch), ending.last_line(code, launch)) == (ends_with, says)


@pytest.mark.parametrize(
    ("nodes", "is_elastic"),
    [("1:4", True), ("2:2", False), ("4", False), ("", False)],
)
@pytest.mark.parametrize("told", ["by option", "by two words", "by variable"])
def test_signal_ends_elastic_launch_with_restarting_code(
    launch_of, monkeypatch, nodes, is_elastic, told
):
    """Code 0 would tell the torchrun of the other hosts that the run is done, and end it."""
    words = {"by option": [f"--nnodes={nodes}"], "by two words": ["-nnodes", nodes]}.get(told, [])
    agent = SimpleNamespace(cmdline=lambda: ["python", "bin/torchrun", *words, "train.py"])
    monkeypatch.setattr(psutil.Process, "parents", lambda self: [agent])
    monkeypatch.setenv("PET_NNODES", nodes if told == "by variable" else "")
    launch = launch_of(TORCHRUN)
    assert launch.is_elastic == is_elastic
    assert not launch_of(SLURM).is_elastic
    assert ending.exit_code(3, launch) == 0  # by the file STOP: all hosts end
    assert ending.exit_code(3, launch, by_signal=True) == (3 if is_elastic else 0)
    assert [ending.exit_code(code, launch, by_signal=True) for code in (0, 1, 2)] == [0, 1, 2]


def test_signal_to_torchrun_on_several_hosts_restarts(launch_of):
    """It restarts its own ranks because a rank of this host died."""
    launch = launch_of(TORCHRUN | {"LOCAL_WORLD_SIZE": "1"})
    assert not launch.is_elastic
    assert (ending.exit_code(3, launch), ending.exit_code(3, launch, by_signal=True)) == (0, 3)


def test_jobs_that_are_started_again(launch_of):
    assert launch_of(SLURM).jobs == (("slurm", "77", 2),)
    assert launch_of(TORCHRUN).jobs == ()  # torchrun's default name is no name
    named = launch_of(TORCHRUN | {"TORCHELASTIC_RUN_ID": "a"})
    assert named.jobs == (("torchelastic", "a", 1),)


PROGRAM = "launch/train.py --config"
SHELL_LINES = "set -e\n" * 100


@pytest.mark.parametrize(
    ("parents", "command"),
    [
        ([], f"python {PROGRAM} a.json"),
        ([["/venv/bin/python", "/venv/bin/torchrun"]], f"torchrun {PROGRAM} a.json"),
        (
            [["/venv/bin/python3", "-m", "torch.distributed.run"]],
            f"python -m torch.distributed.run {PROGRAM} a.json",
        ),
        (
            [
                ["python", "-u", "-m", "deepspeed.launcher.launch"],
                ["python", "/venv/bin/deepspeed"],
            ],
            f"deepspeed {PROGRAM} a.json",
        ),
        (
            [["python", "/venv/bin/accelerate", "launch"], ["bash", "-c", SHELL_LINES]],
            f"accelerate launch {PROGRAM} a.json",
        ),
        ([["timeout", "100", "python3"]], f"timeout 100 python3 {PROGRAM} a.json"),
        ([["srun", "--ntasks", "2", "python"]], f"srun --ntasks 2 python {PROGRAM} a.json"),
        ([["bash", "-c", f'{SHELL_LINES}"$@"', "torchrun", "python"]], f"python {PROGRAM} a.json"),
    ],
)
def test_command_comes_from_outermost_launcher_or_this_process(monkeypatch, parents, command):
    arguments = [*PROGRAM.split(), "a.json"]
    lines = [SimpleNamespace(cmdline=lambda words=words: [*words, *arguments]) for words in parents]
    process = SimpleNamespace(parents=lambda: lines)
    monkeypatch.setattr(ending, "psutil", SimpleNamespace(Process=lambda: process, Error=OSError))
    monkeypatch.setattr("sys.argv", [*arguments, "--local_rank=0"])
    assert ending.command_of_this_launch() == command


def test_shell_around_command_is_not_printed():
    """A script of many lines that runs the command; its words are in the shell's command line."""
    code = "from parallel3d.train import ending; print(ending.command_of_this_launch())"
    with open("launched.py", "w") as file:
        file.write(code)
    shell = ["bash", "-c", ': several\n: lines\n"$@"; true', "bash"]
    words = [*shell, sys.executable, "launched.py", "--config", "a b.json"]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert printed == "python launched.py --config 'a b.json'\n"


def test_command_without_launcher_is_installed_program(monkeypatch):
    monkeypatch.setattr(psutil.Process, "parents", lambda self: [])
    monkeypatch.setattr("sys.argv", ["parallel3d train", "--config", "a.json"])
    assert ending.command_of_this_launch() == "parallel3d train --config a.json"


@pytest.mark.slow  # real processes are above, and each launcher's words
@pytest.mark.parametrize("typed", ["parallel3d", "torchrun -m parallel3d"])
def test_command_of_installed_program_under_launcher(typed):
    """It has no script's path: a launcher is known by the program's name and its command."""
    code = (
        "import subprocess, sys\n"
        "from parallel3d.train import ending\n"
        "if sys.argv[-1] == '--local_rank=0':\n"
        " sys.argv = ['parallel3d train', *sys.argv[sys.argv.index('train') + 1:]]\n"
        " print(ending.command_of_this_launch())\n"
        "else:\n subprocess.run([sys.executable, 'child', *sys.argv[-3:], '--local_rank=0'])\n"
    )
    for name in ("child", typed.split()[0]):
        with open(name, "w") as file:
            file.write(code)
    words = [sys.executable, *typed.split(), "train", "--config", "a.json"]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert printed == f"{typed} train --config a.json\n"


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_no_process_group_is_destroyed_before_the_end_is_reported(monkeypatch, command):
    """Destroying one may hang, after others have ended well; the last step is a marked barrier."""
    events = []
    module = importlib.import_module(f"launch.{command}")
    mesh = SimpleNamespace(
        rank=1,
        close=lambda: events.append("close"),
        messages=SimpleNamespace(
            gather_texts=lambda text, aside: events.append(("barrier", aside))
        ),
    )
    pulse = SimpleNamespace(
        doing=lambda text: events.append(text),
        waiting=lambda what: contextmanager(lambda: (yield events.append("waits")))(),
        leave=lambda code: events.append(("leave", code)),
    )

    def leave_process(code):
        raise SystemExit(code)

    monkeypatch.setattr("parallel3d.train.ending.pulse", pulse)
    monkeypatch.setattr(ending, "pulse", pulse)
    monkeypatch.setattr(ending.os, "_exit", leave_process)
    monkeypatch.setattr(module, "resolve_config", lambda config, launch: config)
    monkeypatch.setattr(module, "join", lambda config, launch: mesh)
    end = ending.Ending()
    end.launch = Launch(1, 2, 1, 2)
    if command == "train":
        monkeypatch.setattr(module, "train", lambda *arguments: ending.DONE)
        args = SimpleNamespace(config="ds.json", dry_run=None, json=False)
        code = module.run(args, [], end, StopRequest(end))
    else:
        prefix = "parallel3d.train"
        monkeypatch.setattr("parallel3d.checkpoint.describe.find_checkpoints", lambda path: [path])
        monkeypatch.setattr(f"{prefix}.evaluate_checkpoint.evaluation_config", lambda *a, **b: None)
        monkeypatch.setattr(f"{prefix}.evaluate_checkpoint.evaluate", lambda *arguments: {})
        args = SimpleNamespace(path=None, config=None, samples=None, tasks=None, json=False)
        code = module.evaluate(args, [], end.launch, StopRequest(end))
    with pytest.raises(SystemExit):
        end.leave(code)
    assert events == ["its end", "waits", ("barrier", True), ("leave", ending.DONE)]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(__file__).rpartition("/tests/")[0])
