"""Named points at which a test can kill the process or simulate a full disk (floor 0, no torch).

PARALLEL3D_FAULT="<action> <name> <occurrence> <rank>" acts on that rank when the point of that name
("*": any name) is passed for the <occurrence>-th time, counted from 1:

- `kill` ends the process as kill -9 does;
- `full` raises "no space left on device", from then on each time.

PARALLEL3D_FAULT="record <path>" appends the name of each point to the file <path>-<rank>.

Without the variable a point costs one look-up in the environment.
"""

import errno
import os
import signal

_VARIABLE = "PARALLEL3D_FAULT"
_rank = 0
_passed = 0  # how often the fault's point was passed so far


def fault_point(name: str) -> None:
    """Kill this process or raise ENOSPC here if PARALLEL3D_FAULT asks for it."""
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
    """Set the rank that this process compares faults with."""
    global _rank
    _rank = rank
