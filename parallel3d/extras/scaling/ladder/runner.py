"""Run a ladder: prepare the corpus, train runs as processes, register forecasts in between.

Up to `parallel` runs train at once, and each has its devices to itself.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from math import nan
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

import parallel3d
from parallel3d.base import terminal
from parallel3d.base.arguments import DONE, FAILED, STOPPED
from parallel3d.base.atomic import replace_text
from parallel3d.base.errors import ConfigError
from parallel3d.base.lock import Lock, LockHeld
from parallel3d.base.lock import read as holder_of
from parallel3d.base.step_lines import METRICS, finite, newest
from parallel3d.extras.report.page import require
from parallel3d.extras.scaling import forecast
from parallel3d.extras.scaling.estimator import PARAMETRIC, Estimator
from parallel3d.extras.scaling.fit import fit_law
from parallel3d.extras.scaling.flags import DRAWS
from parallel3d.extras.scaling.forecast import Forecast
from parallel3d.extras.scaling.frontier import with_checks
from parallel3d.extras.scaling.ladder.expand import LadderRun
from parallel3d.extras.scaling.ladder.plan import Runs, checkpoints, resume_of, state_of
from parallel3d.extras.scaling.points import points_of
from parallel3d.extras.scaling.runs import CORPUS, read_runs

LOCK = "ladder.lock"
_POLL_SECONDS = 0.2  # between two checks of the processes
TRAIN = Path(parallel3d.__file__).parent / "launch" / "train.py"
LOGS = "logs"  # folder in a ladder's directory with the output of each run
VISIBLE = "CUDA_VISIBLE_DEVICES"
_NODES = Path("/dev")


@dataclass(frozen=True)
class Process:
    """A run in training, with its process, log file, devices and progress bar."""

    run: LadderRun
    popen: "subprocess.Popen[bytes]"
    log: Path
    devices: tuple[str, ...]
    bar: TaskID

    def last_message(self) -> str:
        """Return the last error message in the log, or its last line if there is none."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        errors = [line for line in lines if line.startswith("train: ") or "Error" in line]
        return (errors or lines or ["no output"])[-1].strip()


class Display(Progress):
    """Progress bars of the runs on a terminal; otherwise a line as each run starts and ends."""

    def __init__(self, out: Console, total: int, finished: int) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
        )
        super().__init__(*columns, console=out, disable=not out.is_terminal)
        self._started = time.monotonic()
        self.all_runs = self.add_task("all runs", total=total, completed=finished, loss="")

    def say(self, text: str) -> None:
        """Print a line with the time since the start."""
        seconds = int(time.monotonic() - self._started)
        terminal.say(self.console, f"{seconds // 60:3}:{seconds % 60:02}  {text}", " " * 8)

    def update_bars(self, processes: Iterable[Process]) -> None:
        """Update the bars from the metrics of the runs."""
        for process in () if self.disable else processes:
            last = newest(process.run.folder / METRICS)
            loss = last.get("loss") or nan
            self.update(process.bar, completed=last.get("step", 0), loss=f"loss {loss:.3f}")


class Runner:
    """Starts runs as processes, up to `parallel` at once, and follows each to its end."""

    def __init__(self, ladder: Runs, parallel: int, display: Display) -> None:
        self._ladder = ladder
        self._parallel = parallel
        self._display = display
        self._say_once = cache(display.say)
        self._devices = visible_devices()
        self._has_devices = bool(self._devices)
        self._running: list[Process] = []
        self.failed: dict[str, str] = {}
        """Name of each run that failed -> reason."""
        self.is_stopped = False
        """True after a request to stop."""
        most = max((rung.run.devices for rung in ladder.rungs), default=1)
        if self._devices and most > len(self._devices):
            raise ConfigError(
                f"the ladder has a run for {most} devices, but {len(self._devices)} are visible "
                "on this machine; use a smaller mesh, or --emit slurm"
            )

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Stop all runs, each with its state saved, on SIGINT or SIGTERM."""

        def request_stop(*signal_and_frame: object) -> None:
            self.is_stopped = True

        before: dict[int, Any] = {
            n: signal.signal(n, request_stop) for n in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self, runs: Sequence[LadderRun]) -> None:
        """Train runs, each after its trunk, until all have finished, failed or stopped."""
        waiting = sorted(runs, key=lambda run: (run.kind != "trunk", -run.exact_flops))
        is_stopping = False
        try:
            while waiting or self._running:
                self._collect()
                if self.is_stopped and not is_stopping:
                    is_stopping = True
                    waiting = []
                    self._display.say(f"stopping {len(self._running)} runs; each saves its state")
                    self._stop()
                for run in [run for run in waiting if run.trunk in self.failed]:
                    waiting.remove(run)
                    self.fail(run, f"its trunk {run.trunk} did not finish")
                if ready := self._ready(waiting):
                    waiting.remove(ready)
                    self._start(ready)
                else:
                    self._display.update_bars(self._running)
                    time.sleep(_POLL_SECONDS)
        finally:
            self._stop()  # leave no run behind after an error in this process

    def _ready(self, waiting: Sequence[LadderRun]) -> LadderRun | None:
        """Return the first run with free devices whose trunk has saved its checkpoint.

        A run that a killed ladder started may still be saving: its own lock is then held.
        """
        for run in waiting if len(self._running) < self._parallel else ():
            begin = Path(str(run.config.checkpoint.resume)) / "manifest.json"
            has_start = not run.trunk or checkpoints(run.folder) or begin.exists()
            has_room = not self._has_devices or run.devices <= len(self._devices)
            holder = holder_of(run.folder.with_name(f"{run.folder.name}.lock"))
            if holder and holder.is_alive():
                self._say_once(f"{run.name}: waiting for {holder}, which is training it")
            elif has_start and has_room:
                return run
        return None

    def _start(self, run: LadderRun) -> None:
        """Start the process of a run; it gets SIGTERM if this process dies."""
        command = [sys.executable]
        if run.devices > 1:  # --standalone finds a free port
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc-per-node={run.devices}"]
        command += [str(TRAIN), "--config", str(self._ladder.config_file(run))]
        command += ["--parallel3d.checkpoint.resume", resume_of(run)]
        # Threads affect results, so their number must not depend on the other runs.
        threads = max(1, (os.cpu_count() or 1) // (self._parallel * run.devices))
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
        count = run.devices if self._has_devices else 0
        devices = self._devices[:count]
        self._devices = self._devices[count:]
        if devices:
            environment[VISIBLE] = ",".join(devices)
        log = self._ladder.directory / LOGS / f"{run.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        libc = ctypes.CDLL(None)  # load it here: a forked child must not load libraries

        def die_with_parent() -> None:
            if sys.platform == "linux":
                libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG

        with log.open("ab") as file:
            # A new session, so that Ctrl-C reaches only this process, which stops each run once.
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        bar = self._display.add_task(run.name, total=run.steps, loss="")
        self._running.append(Process(run, popen, log, devices, bar))
        self._display.say(f"{run.name}: started")

    def _collect(self) -> None:
        """Record the outcome of the processes that have ended, and free their devices."""
        for process in list(self._running):
            if (code := process.popen.poll()) is not None:
                self._running.remove(process)
                self._devices += process.devices
                self._record(process, code)

    def _record(self, process: Process, code: int) -> None:
        run = process.run
        state = state_of(run)
        is_finished = code == 0 and state.name == "finished"
        self._display.remove_task(process.bar)
        self._display.advance(self._display.all_runs, int(is_finished))
        if is_finished:
            loss = "" if state.loss is None else f", held-out loss {state.loss:.4f}"
            self._display.say(f"{run.name}: finished{loss}")
        elif self.is_stopped:
            self._display.say(f"{run.name}: stopped at step {state.step:,} of {run.steps:,}")
        else:
            self.fail(run, f"exit code {code}: {process.last_message()}; see {process.log}")

    def fail(self, run: LadderRun, why: str) -> None:
        """Record that a run failed, and print it."""
        self.failed[run.name] = why
        self._display.say(f"{run.name}: FAILED: {why}")

    def _stop(self) -> None:
        for process in self._running:
            process.popen.terminate()


def visible_devices() -> tuple[str, ...]:
    """Return the names of the visible accelerators, as in CUDA_VISIBLE_DEVICES; () for the CPU."""
    if VISIBLE in os.environ:
        names = map(str.strip, os.environ[VISIBLE].split(","))
        return tuple(name for name in names if name not in ("", "-1"))
    # A container has device files with the host's numbers, but CUDA counts its devices from 0.
    return tuple(str(place) for place, _ in enumerate(_NODES.glob("nvidia[0-9]*")))


def execute(read: Callable[[], Runs], parallel: int, out: Console) -> tuple[int, Runs]:
    """Train the unfinished runs of a ladder; return the exit code and the ladder's new state.

    `read` returns the ladder with the current states of its runs. Raises ConfigError if another
    process runs the same ladder.
    """
    ladder = read()
    ladder.directory.mkdir(parents=True, exist_ok=True)
    lock = Lock(ladder.directory / LOCK, about=str(ladder.file))
    try:
        lock.take(lambda text: terminal.say(out, text))
    except LockHeld as error:
        raise ConfigError(
            f"{ladder.directory}: the ladder is already being run by {error.holder}; wait for it "
            "to end, or stop it"
        ) from None
    try:
        code = _execute(ladder, parallel, out)
        if code == DONE and not ladder.is_tuned:
            code = _execute(read(), parallel, out)  # with the tuned rate and batch
    finally:
        lock.release()
    return code, read()


def _execute(ladder: Runs, parallel: int, out: Console) -> int:
    ladder.write_configs()
    rungs = [rung for rung in ladder.rungs if rung.state.name != "finished"]
    trunks = {rung.run.trunk for rung in rungs}  # trunks that unfinished forks need
    todo = [r.run for r in rungs if r.run.kind != "trunk" or r.run.name in trunks]
    todo = [run for run in todo if run.kind == "tune"] or todo
    with Display(out, len(ladder.rungs), len(ladder.rungs) - len(rungs)) as display:
        runner = Runner(ladder, parallel, display)
        with runner.listening():
            if todo and not (ladder.directory / CORPUS).exists():
                display.say("preparing the corpus")
                _prepare(ladder)
            runner.run([run for run in todo if run.kind != "held-out"])
            held_out = [run for run in todo if run.kind == "held-out"]
            if held_out and not runner.is_stopped:
                _forecast(ladder, held_out, runner, display)
                runner.run([run for run in held_out if run.name not in runner.failed])
    if runner.is_stopped:
        terminal.say(out, "stopped on request; every run saved its state: run again to continue")
        return STOPPED
    return FAILED if runner.failed else DONE


def _prepare(ladder: Runs) -> None:
    """Tokenize the corpus once, before parallel runs need it, and record its number of tokens."""
    run = ladder.rungs[0].run
    config = ladder.config_file(run)
    command = [sys.executable, str(TRAIN.with_name("prepare.py")), "--config", str(config)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    if done.returncode == STOPPED:
        return
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}, no output"]
        raise ConfigError(f"cannot prepare the corpus: {lines[-1]}")
    summary = json.loads(done.stdout)
    corpus = {"training_tokens": round(run.tokens / summary["epochs"]), "summary": summary}
    replace_text(ladder.directory / CORPUS, f"{json.dumps(corpus, indent=1)}\n")


def _forecast(ladder: Runs, held_out: list[LadderRun], runner: Runner, display: Display) -> None:
    """Register a forecast for each held-out run; mark runs without one as failed."""
    for run in held_out:
        file = ladder.forecast_file(run)
        try:
            if runner.failed and not file.exists():
                raise ConfigError(f"it needs the failed runs {', '.join(runner.failed)}")
            prediction = register(ladder, run)
        except ConfigError as error:
            runner.fail(run, f"not started: cannot register its forecast: {error}")
        else:
            if prediction and prediction.loss is not None:
                display.say(f"{run.name}: forecast {prediction.loss:.4f}, registered in {file}")
                for warning in prediction.warnings:
                    display.say(f"WARNING: {warning}")


def register(ladder: Runs, run: LadderRun) -> Forecast | None:
    """Fit the parametric law to the finished runs and register the forecast of a held-out run.

    Returns None if a forecast is registered already. Raises ConfigError if the runs do not
    determine the law.
    """
    file = ladder.forecast_file(run)
    if file.exists():
        return None
    require("scipy")
    table = read_runs(ladder.directory)
    fitted = {rung.run.name for rung in ladder.rungs if rung.run.kind == "fit"}
    table = table.take([i for i, name in enumerate(table.names) if name in fitted])
    fitted_law = fit_law(points_of(table, {}), PARAMETRIC, Estimator(), draws=DRAWS)
    fit = replace(with_checks(fitted_law, table), path=ladder.directory / "forecast-fit.json")
    replace_text(fit.path, json.dumps(finite(fit.document())))
    prediction = forecast.forecast(fit, params=run.counts.with_head, tokens=run.tokens)
    forecast.register(file, prediction, fit)
    return prediction
