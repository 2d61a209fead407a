"""Launches over several hosts: by torchrun, by deepspeed over a stub ssh, and as srun does."""

import json
import multiprocessing as mp
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from parallel3d.mesh.device import settle_accelerator
from parallel3d.verify import local_ranks
from tests.checkpoint.drill import changed, unknown_peak
from tests.launch.launching import TRAIN, become, environment

ROOT = Path(__file__).parents[2]
DOCTOR = str(ROOT / "launch/doctor.py")
PORT = 29500  # each host has its own ports


@dataclass
class Launched:
    """A command on one or more hosts: its processes and their logs, by host."""

    processes: list
    logs: list[Path]

    def codes(self, seconds=120):
        """The exit codes, once all have ended."""
        deadline = time.monotonic() + seconds
        codes = [_code(process) for process in self.processes]
        while None in codes:
            assert time.monotonic() < deadline, f"{codes}: {self.output}"
            time.sleep(0.05)
            codes = [_code(process) for process in self.processes]
        return codes

    def wait_for(self, look, seconds=120):
        """Until `look` is true, while nothing has ended."""
        deadline = time.monotonic() + seconds
        while not look():
            assert all(_code(process) is None for process in self.processes), self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)

    @property
    def texts(self):
        return [log.read_text() for log in self.logs]

    @property
    def output(self):
        return "\n".join(f"--- {log}\n{log.read_text()[-5000:]}" for log in self.logs)


def without_dropout(config):
    """The config whose losses are the same however dp cuts a batch into microbatches."""
    names = ("embd_pdrop", "resid_pdrop", "attn_pdrop")
    return changed(config, {f"parallel3d.model.{name}": 0.0 for name in names})


def _code(process):
    return process.poll() if isinstance(process, subprocess.Popen) else process.exitcode


class Run:
    """A run of `drill.prepared_config` on several hosts, in a folder that they share."""

    def __init__(self, config, name, root, **changes):
        self.root = Path(root)
        self.name = name
        changes = {key.replace("__", "."): value for key, value in changes.items()}
        self.config = changed(config, {"parallel3d.run.name": name} | changes)
        self.folder = Path(self.config["parallel3d"]["run"]["directory"], name)
        self._count = 0

    def words(self, mesh, **changes):
        """The script and its options for a mesh; a whole step has the same samples on each."""
        pp, dp, tp = mesh
        micro = self.config["train_micro_batch_size_per_gpu"] // dp
        placement = {"parallel3d.mesh.pp": pp, "parallel3d.mesh.tp": tp}
        placement["train_micro_batch_size_per_gpu"] = micro
        changes = {key.replace("__", "."): value for key, value in changes.items()}
        self._count += 1
        path = self.root / f"{self.name}-{self._count}.json"
        path.write_text(json.dumps(changed(self.config, placement | changes)))
        return [TRAIN, "--config", str(path)]

    def log(self, label):
        return self.root / f"{self.name}-{self._count}-{label}.log"

    @property
    def lines(self):
        path = self.folder / "metrics.jsonl"
        return [*map(json.loads, path.read_text().splitlines())] if path.exists() else []

    def saved(self, step):
        return (self.folder / f"checkpoints/step-{step}/manifest.json").exists()

    def check_same(self, reference, first=1):
        """Each step from `first` on once, with the losses and norms of the reference."""
        expected = reference.lines[first - 1 :]
        assert [line["step"] for line in self.lines] == [line["step"] for line in expected]
        for line, other in zip(self.lines, expected, strict=True):
            assert line["tokens"] == other["tokens"], (line, other)
            for key in ("loss", "grad_norm"):
                assert line[key] == pytest.approx(other[key], rel=2e-5), (key, line, other)


def start(host, words, log, folder, **variables):
    """Start a command in a host."""
    env = environment() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    with open(log, "w") as file:
        return subprocess.Popen(
            host.words(*words, folder=folder), env=env, stdout=file, stderr=file
        )


def torchrun(hosts, words, log, folder, ranks=1, limits=(), store=None, variables=(), **options):
    """`torchrun` on each host, which meet by c10d at the first, or at the host `store`."""
    options = {"nnodes": len(hosts), "nproc_per_node": ranks} | options
    flags = [f"--{name}={value}" for name, value in options.items()]
    if len(hosts) > 1 or options["nnodes"] != 1:
        endpoint = f"--rdzv_endpoint={(store or hosts[0]).name}:{PORT}"
        flags += ["--rdzv_backend=c10d", "--rdzv_id=run", endpoint]
    logs = [log(host.name) for host in hosts]
    command = [*limits, "torchrun", *flags, *words]
    places = zip(hosts, logs, strict=True)
    return Launched([start(h, command, out, folder, **dict(variables)) for h, out in places], logs)


# What pdsh does with PDSH_RCMD_TYPE=ssh, and a shell in the host in place of ssh's.
PDSH = """#!/bin/sh
while [ "$1" != -w ]; do shift; done
hosts=$2; shift 2; number=0
for host in $(echo "$hosts" | tr , ' '); do
    ssh "$host" $(echo "$@" | sed "s/%n/$number/") &
    children="$children $!"; number=$((number + 1))
done
code=0
for child in $children; do wait $child || code=$?; done
exit $code
"""
SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do [ "$1" = -o ] && shift; shift; done
host=$1; shift
case $host in %s *) echo "ssh: no route to $host" >&2; exit 255;; esac
exec nsenter --target=$pid --net --uts --mount --pid %s sh -c "$*"
"""


def deepspeed(hosts, words, log, folder, ranks=1, limits=()):
    """`deepspeed` on this machine with a hostfile, over an ssh that enters the hosts.

    It is started beside the hosts, as on a login node, and asks the first for its address.
    """
    programs = Path(folder, "bin")
    programs.mkdir(exist_ok=True)
    cases = " ".join(f"{host.name}) pid={host.pid};;" for host in hosts)
    for name, text in (("pdsh", PDSH), ("ssh", SSH % (cases, shlex.join(limits)))):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    hostfile = Path(folder, "hostfile")
    hostfile.write_text("".join(f"{host.name} slots={ranks}\n" for host in hosts))
    command = ["deepspeed", f"--hostfile={hostfile}", *words]
    env = environment() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{programs}:{env['PATH']}"
    out = log("deepspeed")
    with open(out, "w") as file:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=file, stderr=file)
    return Launched([process], [out])


def slurm(hosts, ranks=1):
    """What srun tells each task of a step, host by host."""
    for node in range(len(hosts)):
        for local in range(ranks):
            yield (
                node,
                {
                    "SLURM_JOB_ID": "7",
                    "SLURM_PROCID": str(node * ranks + local),
                    "SLURM_NTASKS": str(len(hosts) * ranks),
                    "SLURM_LOCALID": str(local),
                    "SLURM_NODEID": str(node),
                    "SLURM_STEP_TASKS_PER_NODE": f"{ranks}(x{len(hosts)})",
                    "MASTER_ADDR": hosts[0].name,
                },
            )


def srun(hosts, words, log, folder, ranks=1, limits=()):
    """`python` for each task, with srun's variables."""
    tasks = []
    logs = []
    for node, variables in slurm(hosts, ranks):
        logs.append(log(f"task{variables['SLURM_PROCID']}"))
        command = [*limits, sys.executable, *words]
        tasks.append(start(hosts[node], command, logs[-1], folder, **variables))
    return Launched(tasks, logs)


def forked(hosts, words, log, folder, ranks=1, disturb=None):
    """The same, from a server that has torch loaded: a second of imports in place of eight.

    `disturb(rank)` is called in each rank's process before.
    """
    settle_accelerator()
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(local_ranks.PRELOAD)
    tasks = []
    logs = []
    for rank, (node, variables) in enumerate(slurm(hosts, ranks)):
        logs.append(log(f"rank{rank}"))
        logs[-1].touch()
        act = partial(disturb, rank) if disturb else None
        args = hosts[node], words, folder, environment() | variables, logs[-1], act
        tasks.append(context.Process(target=_fork_in, args=args))
        tasks[-1].start()
    return Launched(tasks, logs)


def _fork_in(host, words, folder, env, log, disturb):
    """Fork a rank within the host, so that it has a pid there; end as it does."""
    host.enter()
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    from launch import doctor, train
    from parallel3d.train import known_hardware

    become(words, folder, log, env)
    known_hardware.peak = unknown_peak  # measuring takes a second
    if disturb:
        disturb()
    (doctor if words[0] == DOCTOR else train).main()
