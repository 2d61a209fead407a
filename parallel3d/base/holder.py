"""Who holds a lock, as its file says it, and whether they live (floor 0)."""

import json
import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

Job = tuple[str, str, int]
"""What a launcher starts again: its kind, its identity, how often it has been started before."""


@dataclass(frozen=True)
class Holder:
    """Who holds a lock, as its file says."""

    token: str
    """Of this lock alone: no two are equal."""
    host: str
    place: str
    """The boot of the machine and the namespace within which `pid` means anything."""
    pid: int
    started: str
    """When the process was started; another process may have its pid later."""
    jobs: tuple[Job, ...] = ()
    since: str = ""
    about: str = ""
    """What the lock is taken for, in its owner's words."""
    beat: int = 0

    def __str__(self) -> str:
        jobs = "".join(f", {kind} job {name}" for kind, name, _ in self.jobs)
        return f"process {self.pid} on {self.host}{jobs}, since {self.since}"

    def is_alive(self, jobs: tuple[Job, ...] = ()) -> bool | None:
        """Whether the holder lives; None if only its heartbeat can tell. `jobs` are the asker's."""
        if (self.host, self.place) == (socket.gethostname(), place_of_this_process()):
            return start_of(self.pid) == self.started
        for kind, name, count in self.jobs:
            # Slurm starts a job again after it has ended it. What a torchrun starts again may have
            # the name of another's: users choose it (--rdzv-id).
            if kind == "slurm" and any(
                mine[:2] == (kind, name) and mine[2] > count for mine in jobs
            ):
                return False
        return None


def read(path: Path) -> Holder | None:
    """Who holds the lock at `path`; None if nobody does.

    A damaged file is a holder of whom nothing is known but that it is silent.
    """
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return None
    try:
        said = json.loads(text)
        jobs = tuple((str(k), str(n), int(c)) for k, n, c in said.pop("jobs"))
        return Holder(**{**said, "jobs": jobs})
    except (ValueError, TypeError, KeyError, AttributeError):
        return Holder(token=f"damaged {text}", host="?", place="?", pid=0, started="")


def text_of(holder: Holder) -> str:
    """The text of a lock's file, always of one length: a heartbeat overwrites the one before."""
    said = asdict(holder)
    beat = said.pop("beat")
    return f'{json.dumps(said)[:-1]}, "beat": {beat:12}}}\n'


def place_of_this_process() -> str:
    """What tells two machines apart, and two containers of one machine."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def start_of(pid: int) -> str | None:
    """When a process was started; None if there is none, or only its remains."""
    try:
        # The kernel's own count: what psutil makes of it moves when the clock is set.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except OSError:
        pass
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            return f"{process.create_time():.0f}"
    return None
