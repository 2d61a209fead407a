"""One run of a ladder as a process: launch/train.py on a share of a machine."""

import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import parallel3d
from parallel3d.scaling.ladder.expand import LadderRun

TRAIN = Path(parallel3d.__file__).parent / "launch" / "train.py"
LOGS = "logs"  # of a ladder's directory: what each run said
VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICE = re.compile(r"\d+$|GPU-|MIG-")
_NODES = Path("/dev")
_THREADS = "OMP_NUM_THREADS"
_SET_PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG


@dataclass
class Process:
    """A run that is training: its process, its log, its devices."""

    run: LadderRun
    popen: "subprocess.Popen[bytes]"
    log: Path
    devices: tuple[str, ...]

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ask the run to save and end, by SIGTERM."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)

    def last_words(self) -> str:
        """The last line of the run's log, which says why it ended."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        except OSError:
            lines = []
        said = [line.strip() for line in lines[-40:] if line.strip()]
        named = [line for line in said if line.startswith("train: ") or "Error" in line]
        return (named or said or ["it said nothing"])[-1]


def visible_devices() -> tuple[str, ...]:
    """The accelerators of this machine that runs share; none where runs train on the CPU."""
    if VISIBLE in os.environ:
        names = (name.strip() for name in os.environ[VISIBLE].split(","))
        # As CUDA reads it: what follows a name that is none, such as -1, is not seen.
        return tuple(takewhile(_DEVICE.match, names))
    # Nodes are named by the host's numbers; CUDA numbers those of a container from 0.
    return tuple(str(place) for place, _ in enumerate(_NODES.glob("nvidia[0-9]*")))


def start(
    run: LadderRun, config: Path, *, resume: str, log: Path, devices: Sequence[str], threads: int
) -> Process:
    """Start a run on some devices (none on the CPU) with `threads` threads a rank.

    `resume`: what checkpoint.resume is this time. The run is asked to stop if this process dies.
    """
    command = [sys.executable]
    if run.devices > 1:  # --standalone finds a free port by itself
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={run.devices}"]
    command += [str(TRAIN), "--config", str(config), "--parallel3d.checkpoint.resume", resume]
    environment = {_THREADS: str(threads), **os.environ}
    if devices:
        environment[VISIBLE] = ",".join(devices)
    log.parent.mkdir(parents=True, exist_ok=True)
    libc = ctypes.CDLL(None)  # loaded here: the child may not load anything

    def die_with_parent() -> None:
        if sys.platform == "linux":
            libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)

    with log.open("ab") as file:
        # A session of its own: Ctrl-C reaches this process, which then asks each run once.
        popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment,
            start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip
    return Process(run, popen, log, tuple(devices))
