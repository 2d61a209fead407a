"""Requests to stop or to save: signals, files in the run's folder, a launcher that is gone.

Before training a request ends the process at once, by `Stopped`; from `StopRequest.hold` on it
waits for the end of a step, where all ranks agree on it. A thread also hears the judge's verdict,
while the main thread may wait for a dead rank.
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

if TYPE_CHECKING:  # it needs torch, which a launch that is refused must not wait for
    from parallel3d.mesh.mesh import Mesh

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ONE_CTRL_C = 2.0  # seconds within which SIGINTs are one
_GRACE = 4.0  # seconds that a process has to end by itself, when nothing is trained yet
_LOOK = 0.25  # seconds between looks at what the other ranks and the launcher do
_DEEPSPEED = "deepspeed.launcher.launch"


class Stopped(BaseException):
    """A request to stop that came before there is anything to save.

    Not an Exception: on its way out it passes libraries that turn those into errors of theirs.
    """


class StopRequest:
    """Requests to stop or to save, of this rank and (after `agree`) of any rank.

    `asked` is this rank's wish; `stopping` and `saving` are what all ranks agreed on: only these
    may decide what a rank does next. `end` ends the process where the main thread cannot.
    """

    def __init__(self, end: Ending | None = None) -> None:
        self._end = end or Ending()
        self._flush: Callable[[], None] = lambda: None
        self.asked = self.stopping = self.saving = False
        self._held = self._listening = False
        self._since = 0.0
        self._folder: Path | None = None
        self._lock = threading.Lock()

    @contextmanager
    def listening(self) -> Iterator["StopRequest"]:
        """Take SIGINT and SIGTERM for requests; a second Ctrl-C interrupts at once.

        When `Stopped` leaves the block the process must end with exit code 3; it is ended after 4
        s.
        """
        self._listening = True
        previous = [signal.signal(s, self._hear) for s in SIGNALS]
        ear, mouth = os.pipe()
        os.set_blocking(mouth, False)
        # A thread hears of signals while the main thread runs no Python, and cannot handle them.
        former = signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
        watch = threading.Thread(target=self._watch, args=(ear,), daemon=True)
        watch.start()
        try:
            yield self
        finally:
            with self._lock:
                self._listening = False
            signal.set_wakeup_fd(former)
            os.close(mouth)  # ends the thread
            watch.join()
            os.close(ear)
            # A request is one until the process ends: launchers repeat it meanwhile.
            if not self.asked:
                for s, handler in zip(SIGNALS, previous, strict=True):
                    signal.signal(s, handler)

    def hold(self, folder: Path | None, flush: Callable[[], None] = lambda: None) -> None:
        """Let a request wait for the end of a step; raises Stopped if there has been one.

        `folder` is the run's on the rank that looks there for the files STOP and SAVE, None on
        others; `flush` writes what a run has not written yet.
        """
        self._folder, self._flush = folder, flush
        self._held = True
        if self.asked:  # an exception that was swallowed, in a destructor for example
            self._held = False
            raise Stopped

    def flags(self) -> list[float]:
        """Numbers of this rank's requests, to stop and to save, for a row that ranks gather."""
        # A look is one stat, and there is none for what is known already.
        self.asked = self.asked or self._finds("STOP")
        return [float(self.asked), float(self.saving or self._finds("SAVE"))]

    def agree(self, rows: Sequence[Sequence[float]]) -> None:
        """Take over any rank's requests; `rows` are all ranks' `flags()`, equal everywhere."""
        self.stopping = self.stopping or any(row[0] for row in rows)
        self.saving = self.saving or any(row[1] for row in rows)
        self.asked = self.asked or self.stopping

    def saved(self) -> None:
        """Note that the requested save has begun: the file SAVE goes."""
        if self.saving:
            self.saving = False
            self._remove("SAVE")

    def finished(self) -> None:
        """Note that all is saved or done: the request files go, or they stop the next start."""
        self._remove("SAVE")
        self._remove("STOP")

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.asked:
            self.asked, self._since = True, now
            if not self._held:
                raise Stopped
        # torchrun hands a Ctrl-C on to ranks that have had it from the terminal.
        elif (
            number == signal.SIGINT
            and now - self._since > _ONE_CTRL_C
            and self._held
            and self._listening
        ):
            raise TrainingError("interrupted a second time; nothing more is saved")

    def _watch(self, ear: int) -> None:
        """Turn what Python's handlers do not hear of into a signal, or into the process's end."""
        deadline, launcher = None, _Launcher()
        while True:
            if select.select([ear], [], [], _LOOK)[0]:
                numbers = os.read(ear, 64)
                if not numbers:
                    return
                if deadline is None and any(number in SIGNALS for number in numbers):
                    deadline = time.monotonic() + _GRACE
                    if not self._held:
                        tell_of_request()
            verdict = pulse.verdict()
            if verdict and (self._held or verdict.code != STOPPED):
                self._end.on_verdict(verdict, self._flush)
            if deadline is None:
                if verdict or launcher.is_gone():
                    self._ask()
            elif not self._held and time.monotonic() > deadline:
                self._end.leave(self._end.on_request())

    def _ask(self) -> None:
        with self._lock:
            if self._listening:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def _finds(self, name: str) -> bool:
        # False if the disk is away for a moment; Path.exists would raise.
        return self._folder is not None and os.path.exists(self._folder / name)

    def _remove(self, name: str) -> None:
        if self._folder is not None:
            with suppress(OSError):
                (self._folder / name).unlink()


def end_with(command: Callable[[Ending, StopRequest], int]) -> NoReturn:
    """Run a command that computes on a mesh, and end the process with its exit code."""
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
    """Join the other ranks of a resolved config, watched by a sentry."""
    from parallel3d.mesh.mesh import Mesh  # it loads torch, and what is refused has ended before

    sizes = config.mesh
    if config.train.deterministic:
        from parallel3d.mesh.device import pin_collectives

        pin_collectives()
    return Mesh(sizes.pp, int(sizes.dp), sizes.tp, launch, watched=True)


class _Launcher:
    """Sees the `deepspeed` command die: it dies of a SIGTERM without a word to the ranks."""

    def __init__(self) -> None:
        self._node: psutil.Process | None = None
        with suppress(psutil.Error):
            node = psutil.Process(os.getppid())
            if _DEEPSPEED in node.cmdline():
                self._node, self._command = node, node.ppid()

    def is_gone(self) -> bool:
        """Whether the command that started this node's launcher is dead."""
        with suppress(psutil.Error):
            return self._node is not None and self._node.ppid() != self._command
        return True
