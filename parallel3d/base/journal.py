"""The journal of a run, events.jsonl: launches, ends, faults and what was done (floor 0, no torch).

Any process of the run may write to it once it knows the run's folder. A line is one write, so those
of several ranks do not mix.
"""

import json
import socket
import time
from contextlib import suppress
from pathlib import Path

from parallel3d.base.step_lines import append_line, read_lines

EVENTS = "events.jsonl"
STEP_PARTS = "step_parts"  # the event with the parts of a step's time on each rank
COMPUTE_KINDS = (
    "matmul",
    "attention",
    "memory",
    "host",
)  # the passes of a step by kind of operation, in that event
_ENDS = ("end", "fault", "refused")
_folder: Path | None = None
_step = 0


def open_journal(folder: Path) -> None:
    """Let `record` write to this run's folder from now on."""
    global _folder
    _folder = folder


def reached(step: int) -> None:
    """Set the step that events without one have: the last that is done."""
    global _step
    _step = step


def not_ended(folder: Path) -> bool:
    """True if the newest launch in a run's journal says nothing of its end, as if power was cut."""
    with suppress(OSError):
        for values in reversed(read_lines(folder / EVENTS)):
            if values["event"] in ("launch", *_ENDS):
                return bool(values["event"] == "launch")
    return False


def record(event: str, **values: object) -> None:
    """Append an event with its time in seconds since the epoch, its host and its step.

    Nothing is written before the folder is known and exists, or to a full disk, which whoever
    writes metrics and checkpoints reports.
    """
    if _folder is None:
        return
    common = {"time": round(time.time(), 3), "event": event, "host": socket.gethostname()}
    with suppress(OSError):
        append_line(_folder / EVENTS, json.dumps({**common, "step": _step, **values}))
