"""Requests to stop or to save: signals, files in the run's folder, a launcher that has died.

Before training, a request ends the process at once by raising `Stopped`. After `StopRequest.hold`
it waits for the end of a step, where all ranks agree on it. A thread also polls the arbiter's
outcome, because the main thread may be waiting for a dead rank.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import psutil

from parallel3d.base.arguments import STOPPED
from parallel3d.base.errors import Parallel3DError, TrainingError
from parallel3d.config import RunConfig
from parallel3d.mesh.launch import Launch
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.train.ending import Ending, tell_of_request

if TYPE_CHECKING:  # it loads torch, which is slow; a refused launch should end before that
    from parallel3d.mesh.mesh import Mesh

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ONE_CTRL_C = 2.0  # seconds within which several SIGINTs count as one
_GRACE = 4.0  # seconds that a process has to end by itself before training
_LOOK = 0.25  # seconds between two checks of the other ranks and the launcher
_BY_SIGNAL, _BY_FILE = 1.0, 2.0  # how a rank was asked to stop, as ranks gather it
_DEEPSPEED = "deepspeed.launcher.launch"


class Stopped(BaseException):
    """Raised by a request to stop that comes before there is anything to save.

    It is not an Exception, because libraries on the stack would catch that and raise their own.
    """


class StopRequest:
    """Requests to stop or to save, from this rank and (after `agree`) from any rank.

    `requested` is this rank's own request. `stopping` and `saving` are agreed on by all ranks; only
    they may decide what a rank does next. `end` ends the process if the main thread cannot.
    """

    def __init__(self, end: Ending | None = None) -> None:
        self._end = end or Ending()
        self._flush: Callable[[], None] = lambda: None
        self.requested = self.stopping = self.saving = False
        self._held = self._listening = False
        self._since = 0.0
        self._folder: Path | None = None
        self._lock = threading.Lock()

    @contextmanager
    def listening(self) -> Iterator["StopRequest"]:
        """Handle SIGINT and SIGTERM as requests in this block; a second Ctrl-C interrupts at once.

        If `Stopped` leaves the block, the process must end with exit code 3 within 4 seconds;
        otherwise a thread ends it.
        """
        self._listening = True
        previous = [signal.signal(s, self._hear) for s in SIGNALS]
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        # By this pipe a thread learns of signals even while the main thread runs no Python code.
        former = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        watch = threading.Thread(target=self._watch, args=(read_end,), daemon=True)
        watch.start()
        try:
            yield self
        finally:
            with self._lock:
                self._listening = False
            signal.set_wakeup_fd(former)
            os.close(write_end)  # ends the thread
            watch.join()
            os.close(read_end)
            # After a request keep the handlers: launchers repeat signals until the process ends.
            if not self.requested:
                for s, handler in zip(SIGNALS, previous, strict=True):
                    signal.signal(s, handler)

    def hold(self, folder: Path | None, flush: Callable[[], None] = lambda: None) -> None:
        """Let a request wait for the end of a step from now on; raise Stopped if there was one.

        `folder` is the run's folder on the rank that checks it for the files STOP and SAVE, None on
        others. `flush` closes the run's open files.
        """
        self._folder, self._flush = folder, flush
        self._held = True
        if self.requested:  # the exception was swallowed, for example in a destructor
            self._held = False
            raise Stopped

    def flags(self) -> list[float]:
        """Return this rank's requests to stop and to save, for ranks to gather; 0.0 is none."""
        asked = _BY_FILE if self._finds("STOP") else _BY_SIGNAL * self.requested
        self.requested = asked > 0
        return [asked, float(self.saving or self._finds("SAVE"))]

    def agree(self, rows: Sequence[Sequence[float]]) -> None:
        """Adopt any rank's requests; `rows` are the gathered `flags()` of all ranks."""
        asked = max(row[0] for row in rows)
        self.stopping = self.stopping or asked > 0
        if asked:
            self._end.by_signal = asked == _BY_SIGNAL
        self.saving = self.saving or any(row[1] for row in rows)
        self.requested = self.requested or self.stopping

    def saved(self) -> None:
        """Note that the requested save has begun, and remove the file SAVE."""
        if self.saving:
            self.saving = False
            self._remove("SAVE")

    def finished(self) -> None:
        """Remove the files STOP and SAVE at the end of a run, or they would stop the next one."""
        self._remove("SAVE")
        self._remove("STOP")

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.requested:
            self.requested, self._since = True, now
            if not self._held:
                raise Stopped
        # torchrun forwards a Ctrl-C to ranks that already got it from the terminal.
        elif (
            number == signal.SIGINT
            and now - self._since > _ONE_CTRL_C
            and self._held
            and self._listening
        ):
            raise TrainingError(
                "interrupted by a second Ctrl-C; steps since the last save are lost"
            )

    def _watch(self, read_end: int) -> None:
        """Watch for signals, outcomes and a dead launcher; signal or end the process."""
        deadline, launcher = None, _Launcher()
        while True:
            if select.select([read_end], [], [], _LOOK)[0]:
                numbers = os.read(read_end, 64)
                if not numbers:
                    return
                if deadline is None and any(number in SIGNALS for number in numbers):
                    deadline = time.monotonic() + _GRACE
                    if not self._held:
                        tell_of_request()
            outcome = pulse.outcome()
            if outcome and (self._held or outcome.code != STOPPED):
                self._end.on_outcome(outcome, self._flush)
            if deadline is None:
                if outcome or launcher.is_gone():
                    self._ask()
            elif not self._held and time.monotonic() > deadline:
                self._end.leave(self._end.on_request())

    def _ask(self) -> None:
        with self._lock:
            if self._listening:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def _finds(self, name: str) -> bool:
        # os.path.exists returns False if the disk is briefly away; Path.exists would raise.
        return self._folder is not None and os.path.exists(self._folder / name)

    def _remove(self, name: str) -> None:
        if self._folder is not None:
            with suppress(OSError):
                (self._folder / name).unlink()


def end_with(command: Callable[[Ending, StopRequest], int]) -> NoReturn:
    """Run a command that uses a mesh, and end the process with its exit code."""
    end = Ending()
    stop = StopRequest(end)
    try:
        with stop.listening():
            end.launch = Launch.from_environment()
            code = command(end, stop)
    except Stopped:
        code = end.on_request()
    except (Parallel3DError, TrainingError) as error:
        code = end.on_shared_error(error)
    except Exception as error:
        code = end.on_own_error(error)
    end.leave(code)


def join(config: RunConfig, launch: Launch) -> "Mesh":
    """Join the mesh of a resolved config, watched by a sentry process."""
    from parallel3d.mesh.mesh import Mesh  # it loads torch, which is slow

    sizes = config.mesh
    if config.parallel3d.train.deterministic:
        from parallel3d.mesh.device import pin_collectives

        pin_collectives()
    return Mesh(*sizes.sizes, ep=sizes.ep, launch=launch, watched=True)


def meet_at_the_end(mesh: "Mesh") -> None:
    """Wait until every rank is done with its collectives, so that each may end its process.

    Use this instead of `Mesh.close`: destroying NCCL's communicators can hang, and a rank that
    hangs after others have ended well would never be noticed.
    """
    pulse.doing("its end")
    with pulse.waiting("waiting for the other ranks"):
        mesh.gather_texts("", aside=True)


class _Launcher:
    """Detects the death of the `deepspeed` command, which does not pass a SIGTERM on to ranks."""

    def __init__(self) -> None:
        self._node: psutil.Process | None = None
        with suppress(psutil.Error):
            node = psutil.Process(os.getppid())
            if _DEEPSPEED in node.cmdline():
                self._node, self._command = node, node.ppid()

    def is_gone(self) -> bool:
        """Return True if the command that started this node's launcher is dead."""
        with suppress(psutil.Error):
            return self._node is not None and self._node.ppid() != self._command
        return True
