"""The end of a launch: exit code, last line, the command that resumes it; requests to stop or save.

Requests are signals, files in the run's folder, and a launcher that has died. Before training, a
request ends the process at once by raising `Stopped`. After `StopRequest.hold` it waits for the end
of a step, where all ranks agree on it. A thread also polls the arbiter's outcome, because the main
thread may be waiting for a dead rank.
"""

import os
import re
import select
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import psutil

from parallel3d.base.arguments import BAD_INPUT, DONE, FAILED, STOPPED
from parallel3d.base.errors import Parallel3DError, RankError, TrainingError
from parallel3d.base.journal import record
from parallel3d.base.masking import mask
from parallel3d.config import RunConfig
from parallel3d.mesh.launch import Launch
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.mesh.pulse.page import Outcome
from parallel3d.train.launcher import watch_launcher

if TYPE_CHECKING:  # it loads torch, which is slow; a refused launch should end before that
    from parallel3d.mesh.mesh import Mesh

_IN_WORDS = {
    FAILED: "the run failed",
    BAD_INPUT: "bad config or input: do not retry",
    STOPPED: "stopped on request",
}
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_GRACE = 4.0  # seconds that a process has to end by itself before training
_LOOK = 0.25  # seconds between two checks of the other ranks and the launcher
# how a rank was asked to stop, as ranks gather it
_BY_SIGNAL = 1.0
_BY_FILE = 2.0


def _nothing() -> None:
    """Do nothing."""


def _try(last_act: Callable[[], None]) -> None:
    """Call a function for at most three seconds: the main thread may hold a lock that it needs."""
    acting = threading.Thread(target=last_act, daemon=True)
    acting.start()
    acting.join(3.0)


def say(text: str) -> None:
    """Write one line to standard error in a single write."""
    sys.stderr.write(f"{mask(text)}\n")
    sys.stderr.flush()


class Ending:
    """Ends the process, from the main thread or, if that one hangs, from another thread.

    `launch` is set as soon as it is known. The functions in `at_end` are called before the exit.
    """

    def __init__(self) -> None:
        self.launch = Launch(0, 1, 0)
        self.at_end: list[Callable[[], None]] = []
        self.keep_records = _nothing
        """Writes what helps to explain a fault; it may hang."""
        self.by_signal = False  # whether a signal to a rank has stopped the run, not its file STOP

    def leave(self, code: int) -> NoReturn:
        """End the process with this exit code, adapted to the launcher by `exit_code`.

        The process group is not destroyed (see `stopping.meet_at_the_end`).
        """
        pulse.leave(code)
        if swap := sys.modules.get("parallel3d.engine.swap"):  # it loads DeepSpeed
            swap.remove_folders()
        for release in self.at_end:
            release()
        text = last_line(code, self.launch)
        if text and self.launch.rank == 0:
            say(text)
        sys.stdout.flush()
        # Skip the interpreter's shutdown, where gloo's threads can abort the process (code -6).
        os._exit(exit_code(code, self.launch, self.by_signal))

    def on_request(self) -> int:
        """Stop before training on a user's request, which the arbiter passes on; return 3."""
        tell_of_request()
        self.by_signal = True
        if self.launch.rank == 0:
            say(
                "stopped on request before the first step; prepared data is kept. Run the same "
                "command to start again"
            )
            pulse.outcome(2.0)  # it serves the store: the others may have to read the request
        return STOPPED

    def on_outcome(self, outcome: Outcome, flush: Callable[[], None]) -> NoReturn:
        """End the process on the arbiter's outcome, from a thread that does not wait for others."""
        pulse.leave(outcome.code)
        self.by_signal = outcome.code == STOPPED
        print_outcome(outcome)
        _try(flush)
        if outcome.code == FAILED:
            _try(self.keep_records)
        self.leave(outcome.code)

    def on_shared_error(self, error: Exception) -> int:
        """Print an error that all ranks raise, on rank 0 only; return the exit code."""
        code = FAILED if isinstance(error, TrainingError) else BAD_INPUT
        pulse.leave(code)
        if self.launch.rank == 0:
            record("refused", reason=str(error), code=code)
        if self.launch.world_size == 1:  # the error may have come before torch was loaded
            say(str(error))
            return code
        from parallel3d.mesh.join import rank_0_first

        def speak() -> None:
            say(str(error))
            # The launcher terminates the remaining ranks when the first one ends; rank 0 must
            # still print its last line.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

        rank_0_first(self.launch, speak, error)
        return code

    def on_own_error(self, error: Exception) -> int:
        """Print an error of this rank alone and report it to the arbiter; return the exit code."""
        from parallel3d.mesh.join import lost_peer  # it loads torch

        lost = lost_peer(error)
        # The backend may notice a lost peer first, but only the arbiter knows which rank it was and
        # what it was doing.
        outcome = pulse.outcome_after_failed_collective() if lost else None
        if lost and not (outcome and outcome.code == STOPPED):
            _try(self.keep_records)
        if outcome:
            if outcome.code == STOPPED:
                return self.on_request()
            pulse.leave(FAILED)
            print_outcome(outcome)
            return FAILED
        in_short = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        pulse.leave(FAILED, in_short[:200])
        record("fault", rank=self.launch.rank, reason=lost or in_short)
        words = str(error) if isinstance(error, RankError) else traceback.format_exc()
        say(f"rank {self.launch.rank}: {lost or words}")
        return FAILED


def tell_of_request() -> None:
    """Report to the arbiter, for the other ranks, that this one was asked to stop early."""
    pulse.leave(STOPPED, "was asked to stop before the first step")


def print_outcome(outcome: Outcome) -> None:
    """Print which rank ended the run, where, and what it was doing; one line per machine."""
    if outcome.speaks:
        record("fault", reason=outcome.text)
        say(f"{outcome.text}; the run ends")


def last_line(code: int, launch: Launch) -> str:
    """Return a line with the exit code if a launcher may replace it, else ""."""
    if not code or not launch.launcher:
        return ""
    text = f"{_IN_WORDS[code]} (exit code {code})"
    if code == STOPPED and not launch.restarts_left:
        # A person who pressed Ctrl-C may take its traceback for an error of the run.
        text = f"{text}; what follows is {launch.launcher}'s own report of it"
    return text


def exit_code(code: int, launch: Launch, by_signal: bool = False) -> int:
    """Return the exit code for the launcher: 0 for a stop that torchrun would restart.

    `by_signal`: a signal stopped the run. On several hosts it comes from the torchrun of a host
    that leaves, or that has seen another one come or restart: the others must restart then.
    """
    goes_on = launch.has_agents and by_signal
    return DONE if code == STOPPED and launch.restarts_left and not goes_on else code


def command_of_this_launch() -> str:
    """Return the command that the user typed: the outermost launcher's, else this process's own.

    Arguments are quoted for a shell.
    """
    script, *arguments = sys.argv
    # parallel3d/__main__.py sets a name of two words.
    program = script.split() if script.startswith("parallel3d ") else [script]
    words = [*([sys.executable] if len(program) == 1 else []), *program, *arguments]
    with suppress(psutil.Error):
        for process in psutil.Process().parents():
            line = process.cmdline()
            if _launches(line, program):
                words = line
    words[0] = re.sub(r"^python.*", "python", os.path.basename(words[0]))
    if words[0] == "python" and re.fullmatch(r"[^-.][^.]*", os.path.basename(words[1])):
        # Installed scripts are called without their interpreter.
        words = [os.path.basename(words[1]), *words[2:]]
    return mask(shlex.join(word for word in words if not word.startswith("--local_rank")))


def command_to_go_on(config: RunConfig, folder: Path) -> str:
    """Return the command of this launch, with the settings that make it resume in `folder`."""
    command = command_of_this_launch()
    own = config.parallel3d
    if own.run.name == "auto" and own.checkpoint.resume != "auto":
        command += f" --parallel3d.run.name {shlex.quote(folder.name)}"
    if own.checkpoint.resume != "auto":
        command += " --parallel3d.checkpoint.resume auto"
    return command


def _launches(line: list[str], program: list[str]) -> bool:
    """Return True if a process's command line runs `program`, and is no shell's.

    `program` is a script's path, or "parallel3d" and its command.
    """
    names = [*map(os.path.basename, line)]
    if names[0].endswith("sh"):
        return False
    if len(program) == 1:
        return program[0] in line
    return program in map(list, pairwise(names))


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
        self._flush = _nothing
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
        args = read_end, watch_launcher()
        watch = threading.Thread(target=self._watch, args=args, daemon=True)
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

    def hold(
        self,
        folder: Path | None,
        flush: Callable[[], None] = _nothing,
        keep_records: Callable[[], None] = _nothing,
    ) -> None:
        """Let a request wait for the end of a step from now on; raise Stopped if there was one.

        `folder` is the run's folder on the rank that checks it for the files STOP and SAVE, None on
        others. `flush` closes the run's open files; `keep_records` writes what explains a fault.
        """
        self._folder = folder
        self._flush = flush
        self._end.keep_records = keep_records
        self._held = True
        if self.requested:  # the exception was swallowed, for example in a destructor
            self._held = False
            raise Stopped

    def flags(self) -> list[float]:
        """Return this rank's requests to stop and to save, for ranks to gather; 0.0 is none."""
        asked = 0.0
        if self._finds("STOP"):
            asked = _BY_FILE
        elif self.requested:
            asked = _BY_SIGNAL
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
            self.requested = True
            self._since = now
            if not self._held:
                raise Stopped
        # torchrun forwards a Ctrl-C to ranks that already got it from the terminal.
        elif number == signal.SIGINT and now - self._since > 2.0 and self._held and self._listening:
            raise TrainingError(
                "interrupted by a second Ctrl-C; steps since the last save are lost"
            )

    def _watch(self, read_end: int, is_launcher_gone: Callable[[], bool]) -> None:
        """Watch for signals, outcomes and a dead launcher; signal or end the process."""
        deadline = None
        while True:
            if select.select([read_end], [], [], _LOOK)[0]:
                numbers = os.read(read_end, 64)
                if not numbers:
                    return
                if deadline is None and any(number in SIGNALS for number in numbers):
                    deadline = time.monotonic() + _GRACE
                    if not self._held:
                        tell_of_request()
            pulse.look_at_device()
            outcome = pulse.outcome()
            if outcome and (self._held or outcome.code != STOPPED):
                self._end.on_outcome(outcome, self._flush)
            if deadline is None:
                if outcome:
                    self._ask()
                elif is_launcher_gone():
                    if self._end.launch.local_rank == 0:
                        say("the launcher of this run has died, so its ranks end")
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
    return Mesh(**sizes.groups, launch=launch, watched=True)


def meet_at_the_end(mesh: "Mesh") -> None:
    """Wait until every rank is done with its collectives, so that each may end its process.

    Use this instead of `Mesh.close`: destroying NCCL's communicators can hang, and a rank that
    hangs after others have ended well would never be noticed.
    """
    pulse.doing("its end")
    with pulse.waiting("waiting for the other ranks"):
        mesh.messages.gather_texts("", aside=True)
