"""Whether the launcher of this process is still there (floor 5, no torch).

A launcher that is killed cannot end its ranks, and they would hold the run's lock until they time
out.
"""

import os
from collections.abc import Callable
from contextlib import suppress

import psutil

from parallel3d.base.lock import start_of

# The words by which a process is known as one that starts ranks and waits for them.
_LAUNCHERS = {
    "torchrun",
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate",
    "mpirun",
    "mpiexec",
    "orterun",
    "prterun",
    "orted",
    "prted",
    "hydra_pmi_proxy",
}
_NODE_LAUNCHER = "deepspeed.launcher.launch"
# Variables that only such a launcher sets.
_VARIABLES = ("TORCHELASTIC_RUN_ID", "CROSS_RANK", "OMPI_COMM_WORLD_RANK")
_INIT = 1  # the process that adopts orphans


def watch_launcher() -> Callable[[], bool]:
    """Return a function that is True as soon as the launcher of this process is dead.

    With the `deepspeed` command, also if that is dead: it does not pass a SIGTERM on to the ranks,
    whose parent is this node's launcher.
    """
    if os.getppid() == _INIT and any(name in os.environ for name in _VARIABLES):
        return lambda: not _is_launcher(_words(_INIT))
    with suppress(psutil.Error):
        parent = psutil.Process(os.getppid())
        watched = [parent.pid, parent.ppid()]
        if _NODE_LAUNCHER not in parent.cmdline():
            ancestors = [parent, *parent.parents()]
            watched = [p.pid for p in ancestors if _is_launcher(_words(p.pid))][:1]
        starts = {pid: start_of(pid) for pid in watched}
        return lambda: any(start_of(pid) != began for pid, began in starts.items())
    return lambda: False


def _words(pid: int) -> list[str]:
    """Return the first words of a process's command, without their folders; [] if it is gone."""
    with suppress(psutil.Error):
        return [os.path.basename(word) for word in psutil.Process(pid).cmdline()[:4]]
    return []


def _is_launcher(words: list[str]) -> bool:
    """Return True if a command's first words are a launcher's: `python -u -m NAME`, or `NAME`."""
    if not words or words[0].endswith("sh"):  # a shell that names a launcher may end before it
        return False
    first = next((word for word in words[1:] if not word.startswith("-")), "")
    return words[0] in _LAUNCHERS or (words[0].startswith("python") and first in _LAUNCHERS)
