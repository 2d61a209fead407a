"""How a launch ends: its exit code, its last line, the command that goes on (floor 5, no torch)."""

import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress

import psutil

from parallel3d.mesh.launch import Launch

DONE, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 3  # exit codes; scripts rely on them
_IN_WORDS = {
    FAILED: "the run failed",
    BAD_INPUT: "bad config or input: do not retry",
    STOPPED: "stopped on request",
}
_COMMANDS = {"torchrun", "deepspeed"}


def say(text: str) -> None:
    """One line on standard error, in one write."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def end_all(launch: Launch, error: Exception) -> None:
    """Say on rank 0 what ends the run, and have the other ranks end too."""
    if launch.world_size == 1:  # without torch, which it may have come before
        return say(str(error))
    from parallel3d.mesh.join import rank_0_first

    def speak() -> None:
        say(str(error))
        # A launcher that sees the others end first must not cut off the last line.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    rank_0_first(launch, speak, error)


def died(
    launch: Launch, error: Exception, explains_loss: Callable[[], bool], part: Callable[[], int]
) -> int:
    """The exit code of a rank that ends alone: its peers hear of it by losing it.

    `part` gives it where a request to stop `explains_loss` of a peer.
    """
    from parallel3d.mesh.join import lost_peer

    lost = lost_peer(error)
    if lost and explains_loss():
        return part()
    say(f"rank {launch.rank}: {lost or traceback.format_exc()}")
    return FAILED


def last_line(code: int, launch: Launch) -> str:
    """Names the exit code where the launcher puts its own in its place; else ""."""
    return f"{_IN_WORDS[code]} (exit code {code})" if code and launch.launcher else ""


def exit_code(code: int, launch: Launch) -> int:
    """What the process ends with: torchrun would take a stop for a failure, and start again."""
    return DONE if code == STOPPED and launch.restarts_left else code


def command_of_this_launch() -> str:
    """What the user typed, as far as it can be seen: the outermost process that runs this script.

    A shell's quotes are put anew.
    """
    words = [sys.executable, *sys.argv]
    with suppress(psutil.Error):
        for process in psutil.Process().parents():
            line = process.cmdline()
            if sys.argv[0] in line:
                words = line
    if len(words) > 1 and os.path.basename(words[1]) in _COMMANDS:
        words = words[1:]  # a script that an interpreter runs
    words[0] = os.path.basename(words[0])
    if words[0].startswith("python"):
        words[0] = "python"
    return shlex.join(word for word in words if not word.startswith("--local_rank"))
