"""Runner of a ladder's unfinished runs as processes, several at once, and its display."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

import parallel3d
from parallel3d.base import terminal
from parallel3d.base.errors import ConfigError
from parallel3d.base.lock import read as holder_of
from parallel3d.scaling.ladder.expand import LadderRun
from parallel3d.scaling.ladder.plan import Ladder, checkpoints, resume_of, state_of
from parallel3d.scaling.runs import METRICS, NoEnd, last_line

STOPPED = 3  # exit code of a run that was stopped on request
_NAP = 0.2  # seconds between two looks at the processes
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
TRAIN = Path(parallel3d.__file__).parent / "launch" / "train.py"
LOGS = "logs"  # of a ladder's directory: what each run said
VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICE = re.compile(r"\d+$|GPU-|MIG-")
_NODES = Path("/dev")
_THREADS = "OMP_NUM_THREADS"
_SET_PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Process:
    """A run that is training: its process, its log, its devices."""

    run: LadderRun
    popen: "subprocess.Popen[bytes]"
    log: Path
    devices: tuple[str, ...]

    def last_words(self) -> str:
        """Return the last line of the run's log, which says why it ended."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        said = [line.strip() for line in lines[-40:] if line.strip()]
        named = [line for line in said if line.startswith("train: ") or "Error" in line]
        return (named or said or ["it said nothing"])[-1]


class Display(Progress):
    """Bars of the runs in progress on a terminal; elsewhere a line as each begins or ends."""

    def __init__(self, out: Console, total: int, finished: int) -> None:
        columns = (
            TextColumn("{task.description}"), BarColumn(),
            TextColumn("{task.completed}/{task.total}"), TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
        )  # fmt: skip
        super().__init__(*columns, console=out, disable=not out.is_terminal)
        self._started = time.monotonic()
        self._bars: dict[str, TaskID] = {}
        self._all = self.add_task("all runs", total=total, completed=finished, loss="")

    def say(self, text: str) -> None:
        """Print a line with the time since the start."""
        seconds = int(time.monotonic() - self._started)
        terminal.say(self.console, f"{seconds // 60:3}:{seconds % 60:02}  {text}", " " * 8)

    def began(self, run: LadderRun) -> None:
        """Add the bar of a run that has started."""
        self._bars[run.name] = self.add_task(run.name, total=run.steps, loss="")

    def ended(self, run: LadderRun, is_finished: bool) -> None:
        """Remove the bar of a run that has ended."""
        self.remove_task(self._bars.pop(run.name))
        self.advance(self._all, int(is_finished))

    def look(self, processes: Iterable[Process]) -> None:
        """Read how far the runs are, for their bars."""
        for process in () if self.disable else processes:
            try:
                last = last_line(process.run.folder / METRICS)
            except NoEnd:
                continue
            loss = last.get("loss")
            shown = f"loss {loss:.3f}" if isinstance(loss, float) else ""
            self.update(self._bars[process.run.name], completed=int(last["step"]), loss=shown)


class Runner:
    """A runner that starts processes, `parallel` of them at once, and follows each to its end."""

    def __init__(self, ladder: Ladder, parallel: int, display: Display) -> None:
        self._ladder, self._parallel, self._display = ladder, parallel, display
        self._devices = visible_devices()
        self._has_devices = bool(self._devices)
        self._running: list[Process] = []
        self.failed: dict[str, str] = {}
        """Runs that came to no end, and why."""
        self.is_stopped = False
        """True if somebody asked to stop."""
        most = max((rung.run.devices for rung in ladder.rungs), default=1)
        if self._devices and most > len(self._devices):
            raise ConfigError(
                f"a run of the ladder is for {most} devices, and this machine shows "
                f"{len(self._devices)}; use a smaller mesh, or --emit slurm"
            )

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM for a request to stop all runs, each with its state saved."""

        def ask(*of: object) -> None:
            self.is_stopped = True

        before: dict[int, Any] = {number: signal.signal(number, ask) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self, runs: Sequence[LadderRun]) -> None:
        """Train some runs, each after its trunk, until all are finished, failed or stopped."""
        waiting = sorted(runs, key=lambda run: (run.kind != "trunk", -run.exact_flops))
        asked = False
        try:
            while waiting or self._running:
                self._collect()
                if self.is_stopped:
                    waiting = []
                    if self._running and not asked:
                        asked = True
                        runs_now = f"{len(self._running)} runs"
                        self._display.say(f"stopping {runs_now}, each with its state saved")
                        self._stop()
                elif ready := self._ready(waiting):
                    waiting.remove(ready)
                    self._start(ready)
                    continue
                elif not self._running:  # only forks are left, whose trunk failed
                    for run in waiting:
                        self._fail(run, f"its trunk {run.trunk} came to no end")
                    return
                self._display.look(self._running)
                time.sleep(_NAP)
        finally:
            self._stop()  # an error of ours leaves no run behind

    def _ready(self, waiting: Sequence[LadderRun]) -> LadderRun | None:
        """Return the first run that there is room for, and whose trunk is done."""
        room = len(self._running) < self._parallel
        for run in waiting if room else ():
            begin = Path(str(run.config.checkpoint.resume)) / "manifest.json"
            has_start = not run.trunk or checkpoints(run) or begin.exists()
            if has_start and (not self._has_devices or run.devices <= len(self._devices)):
                return run
        return None

    def _start(self, run: LadderRun) -> None:
        self._wait_for_holder(run)
        if self.is_stopped:
            return
        ranks = self._parallel * run.devices  # the same whatever runs beside: so are the bits
        count = run.devices if self._has_devices else 0
        mine, self._devices = self._devices[:count], self._devices[count:]
        ladder = self._ladder
        self._running.append(
            start(
                run, ladder.config_file(run), resume=resume_of(run), devices=mine,
                log=ladder.directory / LOGS / f"{run.name}.log",
                threads=max(1, (os.cpu_count() or 1) // ranks),
            )
        )  # fmt: skip
        self._display.began(run)
        self._display.say(f"{run.name}: started")

    def _wait_for_holder(self, run: LadderRun) -> None:
        """Wait until nobody writes to the run: after a kill of its ladder it saves its state."""
        path = run.folder.with_name(f"{run.folder.name}.lock")
        said = False
        while not self.is_stopped:
            holder = holder_of(path)
            if holder is None or holder.is_alive(()) is not True:
                return
            if not said:
                said = True
                self._display.say(f"{run.name}: is being trained by {holder}; waiting for its end")
            time.sleep(_NAP)

    def _collect(self) -> None:
        """Take the processes that have ended, and see what they came to."""
        for process in list(self._running):
            if (code := process.popen.poll()) is not None:
                self._running.remove(process)
                self._devices += process.devices
                self._judge(process, code)

    def _judge(self, process: Process, code: int) -> None:
        run = process.run
        state = state_of(run)
        is_finished = code == 0 and state.name == "finished"
        self._display.ended(run, is_finished)
        if is_finished:
            loss = "" if state.loss is None else f", held-out loss {state.loss:.4f}"
            error = "" if state.standard_error is None else f" ± {state.standard_error:.4f}"
            self._display.say(f"{run.name}: finished{loss}{error}")
        elif self.is_stopped:
            self._display.say(f"{run.name}: stopped at step {state.step:,} of {run.steps:,}")
        elif code == STOPPED:  # somebody stopped it, and not us
            self._fail(run, f"was stopped at step {state.step:,}")
        else:
            self._fail(run, f"exit code {code}: {process.last_words()}{_remedy(run, process)}")

    def _fail(self, run: LadderRun, why: str) -> None:
        self.failed[run.name] = why
        self._display.say(f"{run.name}: FAILED: {why}")

    def _stop(self) -> None:
        for process in self._running:
            process.popen.terminate()


def _remedy(run: LadderRun, process: Process) -> str:
    """Return where to read more, and what to do where the checkpoint of its trunk failed."""
    begin = Path(str(run.config.checkpoint.resume))
    if not run.trunk or checkpoints(run) or str(begin) not in process.last_words():
        return f"; see {process.log}"
    # Trained again it is the same to the bit, and forks that are finished do not wait for it.
    trunk = begin.parent.parent
    return f"; remove {trunk}, and the next start trains the trunk again; see {process.log}"


def visible_devices() -> tuple[str, ...]:
    """Return the accelerators of this machine that runs share; none where they train on the CPU."""
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
