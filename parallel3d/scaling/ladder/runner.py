"""Runner of a ladder's unfinished runs, several at once."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from parallel3d.base.errors import ConfigError
from parallel3d.base.lock import read as holder_of
from parallel3d.scaling.ladder.expand import LadderRun
from parallel3d.scaling.ladder.plan import Ladder
from parallel3d.scaling.ladder.process import LOGS, Process, start, visible_devices
from parallel3d.scaling.ladder.progress import Display
from parallel3d.scaling.ladder.state import checkpoints, resume_of, state_of

STOPPED = 3  # exit code of a run that was stopped on request
_NAP = 0.2  # seconds between two looks at the processes
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Runner:
    """A runner that starts processes, `parallel` of them at once, and follows each to its end."""

    def __init__(self, ladder: Ladder, parallel: int, display: Display) -> None:
        self._ladder, self._parallel, self._display = ladder, parallel, display
        self._devices = visible_devices()
        self._running: list[Process] = []
        self.failed: dict[str, str] = {}
        """Runs that came to no end, and why."""
        self.is_stopped = False
        """Whether somebody asked to stop."""
        self._has_devices = bool(self._devices)
        most = max((rung.run.devices for rung in ladder.rungs), default=1)
        if self._devices and most > len(self._devices):
            raise ConfigError(
                f"a run of the ladder is for {most} devices, and this machine shows "
                f"{len(self._devices)}; use a smaller mesh, or --emit slurm"
            )

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM for a request to stop all runs, each with its state saved."""

        def ask(number: int, frame: FrameType | None) -> None:
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
                    if not asked:
                        asked = True
                        self._stop()
                elif (place := self._next(waiting)) is not None:
                    self._start(waiting.pop(place))
                    continue
                elif waiting and not self._running:
                    waiting = self._drop_orphans(waiting)
                    continue
                self._display.look(self._running)
                time.sleep(_NAP)
        finally:
            for process in self._running:  # an error of ours leaves no run behind
                process.stop()

    def _next(self, waiting: Sequence[LadderRun]) -> int | None:
        """The first run that there is room for, and whose trunk is done."""
        if len(self._running) >= self._parallel:
            return None
        for place, run in enumerate(waiting):
            fits = not self._has_devices or run.devices <= len(self._devices)
            if fits and self._has_start(run):
                return place
        return None

    def _has_start(self, run: LadderRun) -> bool:
        if not run.trunk or checkpoints(run):
            return True
        return (Path(str(run.config.checkpoint.resume)) / "manifest.json").exists()

    def _drop_orphans(self, waiting: Sequence[LadderRun]) -> list[LadderRun]:
        """Up the runs whose trunk failed; there is nothing else left to wait for."""
        for run in waiting:
            self._fail(run, f"its trunk {run.trunk} came to no end")
        return []

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
        """Until nobody writes to the run: one whose ladder was killed saves its state first."""
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
        """See which processes have ended, and what they came to."""
        for process in list(self._running):
            code = process.popen.poll()
            if code is None:
                continue
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
            error = state.standard_error
            self._display.say(
                f"{run.name}: finished{loss}{'' if error is None else f' ± {error:.4f}'}"
            )
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
        if self._running:
            self._display.say(f"stopping {len(self._running)} runs, each with its state saved")
        for process in self._running:
            process.stop()


def _remedy(run: LadderRun, process: Process) -> str:
    """Where to read more; and what to do where it is the checkpoint of its trunk that failed."""
    begin = Path(str(run.config.checkpoint.resume))
    if not run.trunk or checkpoints(run) or str(begin) not in process.last_words():
        return f"; see {process.log}"
    # Trained again it is the same to the bit, and forks that are finished do not wait for it.
    trunk = begin.parent.parent
    return f"; remove {trunk}, and the next start trains the trunk again; see {process.log}"
