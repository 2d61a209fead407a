"""Starts launch/train.py as a user does, on a small corpus of its own, and sees what is left."""

import gc
import json
import multiprocessing as mp
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from parallel3d.mesh.device import settle_accelerator
from parallel3d.verify import local_ranks
from parallel3d.verify.local_ranks import free_port

TRAIN = str(Path(__file__).parents[2] / "launch/train.py")
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "dog", "run", "far"]
PYTHON = [sys.executable]


def deepspeed(ranks=None):
    """`deepspeed`, which starts one process on a machine without accelerators, or so many."""
    return ["deepspeed", f"--master_port={free_port()}", *([f"--num_gpus={ranks}"] * bool(ranks))]


def torchrun(ranks):
    return ["torchrun", f"--master_port={free_port()}", f"--nproc_per_node={ranks}"]


@dataclass
class Place:
    """A working directory with a corpus; the cache is shared by all that is started there."""

    root: Path

    def __post_init__(self):
        texts = self.root / "texts"
        if texts.is_dir():  # another process has made it
            return
        texts.mkdir(parents=True)
        words = random.Random(0)
        for i in range(40):
            lines = [" ".join(words.choices(WORDS, k=12)) for _ in range(60)]
            (texts / f"{i}.txt").write_text("\n".join(lines))

    @property
    def cache(self):
        return self.root / "cache"

    def command(self, launcher, *arguments, steps=3, warmup=1):
        """The default config, whose name is looked up in configs/, on the small corpus."""
        settings = {
            "parallel3d.data.source": "text",
            "parallel3d.data.paths": json.dumps([f"{self.root}/texts/*.txt"]),
            "parallel3d.data.vocab_size": 270,
            "parallel3d.data.cache": self.cache,
            "parallel3d.train.steps": steps,
            "parallel3d.train.lr_schedule.warmup_steps": warmup,
            "parallel3d.train.evaluate_every": 0,
        }
        pairs = [str(x) for key, value in settings.items() for x in (f"--{key}", value)]
        return [*launcher, TRAIN, "--config", "ds.json", *pairs, *map(str, arguments)]

    def run(self, launcher, *arguments, timeout=200, **settings):
        """Start it and wait for its end."""
        command = self.command(launcher, *arguments, **settings)
        return subprocess.run(
            command,
            cwd=self.root,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def call(self, name, *arguments):
        """Run another command to its good end; returns what it prints."""
        command = [sys.executable, str(Path(TRAIN).with_name(f"{name}.py")), *arguments]
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def assert_optimizer_is_known(self, raw, meshes):
        """Write ds.json, of a small model on 2x2x1, whose optimizer `plan` and `verify` know."""
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        raw["parallel3d"]["model"] |= sizes
        raw["parallel3d"]["data"] = {"sequence_length": 32}
        raw["parallel3d"]["mesh"] = {"pp": 2, "dp": 2, "tp": 1}
        raw["parallel3d"]["checkpoint"] = {"at": [2]}
        (self.root / "ds.json").write_text(json.dumps(raw))
        fits = ("--hardware", "A100-SXM4-80GB", "--devices", "4", "--bf16.enabled", "true")
        (best, *_) = json.loads(self.call("plan", "--config", "ds.json", "--json", *fits))["plans"]
        assert best["memory_bytes"]["optimizer"] > 0
        verified = self.call("verify", "--config", "ds.json", "--meshes", meshes)
        assert "equal to one process" in verified

    def forked(self, log, *arguments, variables=(), disturb=None, **settings):
        """Start plain python's command, but from a server that has torch and DeepSpeed loaded.

        A second of imports in place of eight, for what depends on processes and not on how they
        are made. Call `disturb` in the process first; return it, a session of its own.
        """
        _, *words = self.command(PYTHON, *arguments, **settings)
        log.touch()
        return fork(_run_command, words, self.root, log, environment() | dict(variables), disturb)

    def ended(self, *arguments, timeout=200, **settings):
        """Start it as `forked` does; return its exit code and output."""
        with TemporaryDirectory() as folder:
            log = Path(folder, "log.txt")
            process = self.forked(log, *arguments, **settings)
            process.join(timeout)
            process.kill()
            process.join()
            return process.exitcode, log.read_text()

    @contextmanager
    def started(self, launcher, *arguments, **settings):
        """Start it in a session of its own; whatever of that session is left is killed."""
        command = self.command(launcher, *arguments, steps=400, **settings)
        log = self.root / "log.txt"
        with log.open("w") as file:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=environment(),
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        try:
            yield process, log
        finally:
            for left in session(process.pid):
                left.kill()
            process.wait()

    def lines(self, name):
        """metrics.jsonl of a run, each line whole."""
        path = self.root / "runs" / name / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        assert text == "" or text.endswith("\n")
        return [json.loads(line) for line in text.splitlines()]

    def wait_for_lines(self, name, count, process, seconds=120):
        """Until a run has taken so many steps."""
        deadline = time.monotonic() + seconds
        while len(self.lines(name)) < count:
            assert process.poll() is None, "it ended before it trained"
            assert time.monotonic() < deadline, "it does not train"
            time.sleep(0.1)


def fork(function, *args):
    """Start a function in a process whose parent has torch and DeepSpeed loaded."""
    settle_accelerator()
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(local_ranks.PRELOAD)
    process = context.Process(target=function, args=args)
    process.start()
    return process


def print_into(file):
    """Let this process's standard output be a file of its own."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)


def _run_command(words, folder, log, variables, disturb):
    from launch.train import main

    os.setsid()
    become(words, folder, log, variables)
    if disturb:
        disturb()
    main()


def become(words, folder, log, variables):
    """Give this forked process a command's words, folder, environment and output."""
    gc.freeze()  # `run_locally` freezes, too
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(file, number)
        setattr(sys, name, os.fdopen(number, "w", buffering=1, closefd=False))
    sys.argv = words


def environment():
    """The user's, without what a launcher may have left, and with our python's commands first."""
    launchers = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR"}
    env = {key: value for key, value in os.environ.items() if key not in launchers}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    return env | {"HF_HUB_OFFLINE": "1"}


def session(leader):
    """The living processes of the session that `leader` opened."""
    processes = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return processes


def wait_until_gone(leader, seconds):
    """Until nothing of a session is alive; gives how long it took."""
    start = time.monotonic()
    while left := session(leader):
        assert time.monotonic() - start < seconds, [p.cmdline() for p in left]
        time.sleep(0.1)
    return time.monotonic() - start


def interrupt(process):
    """Ctrl-C: the terminal sends SIGINT to every process of the foreground group."""
    os.killpg(process.pid, signal.SIGINT)
