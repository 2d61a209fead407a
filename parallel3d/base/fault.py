"""Named points at which a test ends the process, or lets the disk be full (floor 0, no torch).

`PARALLEL3D_FAULT="<action> <name> <occurrence> <rank>"`: on that rank, the so many-th time (from 1)
that a point of that name is passed ("*": of any name), `kill` ends the process as kill -9 does,
`full` raises the operating system's "no space left on device", from then on each time. `record`
does nothing but append each point's name to the file `<path>-<rank>`: `record <path>`.

Unset, a point is one comparison.
"""

import errno
import os
import signal
from dataclasses import dataclass
from functools import cache

_VARIABLE = "PARALLEL3D_FAULT"
_rank = 0


@dataclass
class _Plan:
    action: str
    name: str
    occurrence: int = 0
    rank: int = 0
    seen: int = 0

    def at(self, name: str) -> None:
        """What is to happen at a point."""
        if self.action == "record":
            with open(f"{self.name}-{_rank}", "a") as file:
                file.write(name + "\n")
            return
        if _rank != self.rank or self.name not in ("*", name):
            return
        self.seen += 1
        if self.action == "kill" and self.seen == self.occurrence:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.action == "full" and self.seen >= self.occurrence:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fault_point(name: str) -> None:
    """A place where a process may be killed or its disk be full, if a test says so."""
    plan = _plan()
    if plan is not None:
        plan.at(name)


def set_rank(rank: int) -> None:
    """Say which rank this process is."""
    global _rank
    _rank = rank


@cache
def _plan() -> _Plan | None:
    text = os.environ.get(_VARIABLE)
    if text is None:
        return None
    action, name, *numbers = text.split(" ")
    return _Plan(action, name, *map(int, numbers))
