"""The end of a launch: exit code, last line, and the command that resumes it (no torch)."""

import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import psutil

from parallel3d.base.arguments import BAD_INPUT, DONE, FAILED, STOPPED
from parallel3d.base.errors import RankError, TrainingError
from parallel3d.base.journal import record
from parallel3d.base.masking import mask
from parallel3d.config import RunConfig
from parallel3d.mesh.launch import Launch
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.mesh.pulse.page import Outcome

_IN_WORDS = {
    FAILED: "the run failed",
    BAD_INPUT: "bad config or input: do not retry",
    STOPPED: "stopped on request",
}
_LAUNCHERS = {
    *("torchrun", "deepspeed", "accelerate", "srun"),
    *("torch.distributed.run", "deepspeed.launcher.runner", "deepspeed.launcher.launch"),
}
_SEEN = 2.0  # seconds that rank 0, which serves the store, waits for others to read a request
_FLUSH = 3.0  # seconds to flush open files when another rank's fault ends this one


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
        if (text := last_line(code, self.launch)) and self.launch.rank == 0:
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
            pulse.outcome(_SEEN)
        return STOPPED

    def on_outcome(self, outcome: Outcome, flush: Callable[[], None]) -> NoReturn:
        """End the process on the arbiter's outcome, from a thread that does not wait for others."""
        pulse.leave(outcome.code)
        self.by_signal = outcome.code == STOPPED
        print_outcome(outcome)
        flushing = threading.Thread(target=flush, daemon=True)
        flushing.start()
        flushing.join(_FLUSH)  # the main thread may hold a lock that it needs
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
        if lost and (outcome := pulse.outcome_after_failed_collective()):
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
    return f"{_IN_WORDS[code]} (exit code {code})" if code and launch.launcher else ""


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
    if len(words) > 1 and os.path.basename(words[1]) in {*_LAUNCHERS, "parallel3d"}:
        words = words[1:]  # drop the interpreter of an installed script
    words[0] = os.path.basename(words[0])
    if words[0].startswith("python"):
        words[0] = "python"
    return mask(shlex.join(word for word in words if not word.startswith("--local_rank")))


def command_to_go_on(config: RunConfig, folder: Path) -> str:
    """Return the command of this launch, with the settings that make it resume in `folder`."""
    command, own = command_of_this_launch(), config.parallel3d
    if own.run.name == "auto" and own.checkpoint.resume != "auto":
        command += f" --parallel3d.run.name {shlex.quote(folder.name)}"
    if own.checkpoint.resume != "auto":
        command += " --parallel3d.checkpoint.resume auto"
    return command


def _launches(line: list[str], program: list[str]) -> bool:
    """Return True if a process's command line is a launcher's that runs `program`.

    `program` is a script's path, or "parallel3d" and its command.
    """
    is_python = bool(line) and os.path.basename(line[0]).startswith("python")
    first = next((word for word in line[is_python:] if not word.startswith("-")), "")
    names = [*map(os.path.basename, line)]
    runs = program[0] in line if len(program) == 1 else program in map(list, pairwise(names))
    return runs and os.path.basename(first) in _LAUNCHERS
