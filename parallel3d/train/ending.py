"""The end of a launch: exit code, last line, the command that resumes it (no torch)."""

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
from parallel3d.base.masking import mask
from parallel3d.config import RunConfig
from parallel3d.mesh.launch import Launch
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.mesh.pulse.page import Verdict

_IN_WORDS = {
    FAILED: "the run failed",
    BAD_INPUT: "bad config or input: do not retry",
    STOPPED: "stopped on request",
}
_COMMANDS = {"torchrun", "deepspeed", "parallel3d"}
_SEEN = 2.0  # seconds that rank 0, which keeps the store, waits for the others to hear of a request
_FLUSH = 3.0  # seconds for what a run has open, where another rank's fault ends it


def say(text: str) -> None:
    """Write one line on standard error, in one write."""
    sys.stderr.write(f"{mask(text)}\n")
    sys.stderr.flush()


class Ending:
    """The end of the process, from the main thread or, if that one hangs, from another.

    `launch` is set as soon as it is known, and so is what is to be done `at_end`.
    """

    def __init__(self) -> None:
        self.launch = Launch(0, 1, 0)
        self.at_end: list[Callable[[], None]] = []

    def leave(self, code: int) -> NoReturn:
        """End with this exit code, or the code that the launcher takes for it."""
        pulse.leave(code)
        if swap := sys.modules.get("parallel3d.engine.swap"):  # it loads DeepSpeed
            swap.remove_folders()
        for release in self.at_end:
            release()
        if (text := last_line(code, self.launch)) and self.launch.rank == 0:
            say(text)
        sys.stdout.flush()
        # Not through the interpreter's end, where gloo's threads can abort the process (code -6).
        os._exit(exit_code(code, self.launch))

    def on_request(self) -> int:
        """End before training, as a user asked; the judge tells the other ranks. Return 3."""
        tell_of_request()
        if self.launch.rank == 0:
            say(
                "stopped on request before the first step; what is prepared is kept: start again "
                "to go on"
            )
            pulse.verdict(_SEEN)
        return STOPPED

    def on_verdict(self, verdict: Verdict, flush: Callable[[], None]) -> NoReturn:
        """End the process as the judge says, from a thread that waits for nothing."""
        pulse.leave(verdict.code)
        say_verdict(verdict)
        flushing = threading.Thread(target=flush, daemon=True)
        flushing.start()
        flushing.join(_FLUSH)  # what it needs may be held by the main thread
        self.leave(verdict.code)

    def on_shared_error(self, error: Exception) -> int:
        """Say on rank 0 why the run ends, where all ranks raise the same; return the exit code."""
        code = FAILED if isinstance(error, TrainingError) else BAD_INPUT
        pulse.leave(code)
        if self.launch.world_size == 1:  # without torch, which it may have come before
            say(str(error))
            return code
        from parallel3d.mesh.join import rank_0_first

        def speak() -> None:
            say(str(error))
            # A launcher that sees the others end first must not cut off the last line.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

        rank_0_first(self.launch, speak, error)
        return code

    def on_own_error(self, error: Exception) -> int:
        """Say why this rank ends alone, and tell the judge; return the exit code."""
        from parallel3d.mesh.join import lost_peer  # it loads torch

        lost = lost_peer(error)
        # The backend may see a loss first, but not who it was and what they did.
        if lost and (verdict := pulse.verdict(pulse.SOON)):
            if verdict.code == STOPPED:
                return self.on_request()
            pulse.leave(FAILED)
            say_verdict(verdict)
            return FAILED
        in_short = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        pulse.leave(FAILED, in_short[:200])
        words = str(error) if isinstance(error, RankError) else traceback.format_exc()
        say(f"rank {self.launch.rank}: {lost or words}")
        return FAILED


def tell_of_request() -> None:
    """Have the judge tell the other ranks that this one was asked to stop before training."""
    pulse.leave(STOPPED, "was asked to stop before the first step")


def say_verdict(verdict: Verdict) -> None:
    """Say on one line per machine which rank ended the run, where, and what it did."""
    if verdict.speaks:
        say(f"{verdict.text}; the run ends")


def last_line(code: int, launch: Launch) -> str:
    """A line that names the exit code if the launcher replaces it; else ""."""
    return f"{_IN_WORDS[code]} (exit code {code})" if code and launch.launcher else ""


def exit_code(code: int, launch: Launch) -> int:
    """The exit code of the process; torchrun would take a stop for a failure and restart."""
    return DONE if code == STOPPED and launch.restarts_left else code


def command_of_this_launch() -> str:
    """The command that the user typed: the outermost process that runs this script.

    A shell's quotes are put anew.
    """
    script, *arguments = sys.argv
    # parallel3d/__main__.py calls itself by two words.
    named = script.split() if script.startswith("parallel3d ") else [script]
    words = [*([sys.executable] if len(named) == 1 else []), *named, *arguments]
    with suppress(psutil.Error):
        for process in psutil.Process().parents():
            line = process.cmdline()
            if _starts(line, named):
                words = line
    if len(words) > 1 and os.path.basename(words[1]) in _COMMANDS:
        words = words[1:]  # a script that an interpreter runs
    words[0] = os.path.basename(words[0])
    if words[0].startswith("python"):
        words[0] = "python"
    return mask(shlex.join(word for word in words if not word.startswith("--local_rank")))


def command_to_go_on(config: RunConfig, folder: Path) -> str:
    """The command of this launch, with what it needs to find `folder` again."""
    command = command_of_this_launch()
    if config.run.name == "auto" and config.checkpoint.resume != "auto":
        command += f" --parallel3d.run.name {shlex.quote(folder.name)}"
    if config.checkpoint.resume != "auto":
        command += " --parallel3d.checkpoint.resume auto"
    return command


def _starts(line: list[str], named: list[str]) -> bool:
    """Whether a process' words have the script's path, or the program's name and its command."""
    if len(named) == 1:
        return named[0] in line
    return named in map(list, pairwise([*map(os.path.basename, line)]))
