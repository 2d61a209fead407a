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

_VARIABLE = "PARALLEL3D_FAULT"
_rank = 0
_passed = 0  # points of the fault's name, so far


def fault_point(name: str) -> None:
    """A place where a process may be killed or its disk be full, if a test says so."""
    fault = os.environ.get(_VARIABLE)
    if fault is not None:
        _happen(name, *fault.split(" "))


def _happen(name: str, action: str, where: str, occurrence: str = "0", rank: str = "0") -> None:
    global _passed
    if action == "record":
        with open(f"{where}-{_rank}", "a") as file:
            file.write(name + "\n")
        return
    if int(rank) != _rank or where not in ("*", name):
        return
    _passed += 1
    if action == "kill" and _passed == int(occurrence):
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "full" and _passed >= int(occurrence):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def set_rank(rank: int) -> None:
    """Say which rank this process is."""
    global _rank
    _rank = rank
