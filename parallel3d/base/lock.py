"""A lock file with one holder at a time, on any file system; a dead holder's lock is taken over.

The holder creates the file and rewrites it every `BEAT` seconds. On the same machine a holder is
known to be alive by its process, on other machines by this heartbeat. The lock needs no `flock`, no
links and no atomic exchange of two names, which network file systems may lack (floor 0).

filelock's `SoftFileLease` (4.2) is not enough. Without an exchange of names (NFS) it never takes
over a dead holder's lock. It takes the lock of a living holder on another machine with the same
host name, and of a stopped process on its own machine. It waits for a zombie, and forever at an
empty file. It cannot store the holder's job.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from uuid import uuid4

from pydantic import BaseModel, ValidationError

from parallel3d.base.say import Say

BEAT = 2.0  # seconds between two heartbeats
MISSED = 15  # missed heartbeats after which a holder on another machine counts as dead
_NAP = 0.25  # seconds between two reads of a lock
_WRITTEN = 1.0  # seconds after which the creator of an empty lock counts as dead

Job = tuple[str, str, int]
"""A job that a launcher may restart: its kind, its identity, how often it was restarted."""


class Holder(BaseModel, frozen=True):
    """The holder of a lock, as written in its file."""

    token: str
    """Unique to this lock."""
    host: str
    place: str
    """The machine's boot id and the pid namespace in which `pid` is valid."""
    pid: int
    started: str
    """Start time of the process, because a pid may be reused; "" if only the heartbeat can tell."""
    jobs: tuple[Job, ...] = ()
    since: str = ""
    about: str = ""
    """The purpose of the lock, a text of its owner."""
    beat: int = 0

    def __str__(self) -> str:
        jobs = "".join(f", {kind} job {name}" for kind, name, _ in self.jobs)
        return f"process {self.pid} on {self.host}{jobs}, since {self.since}"

    def is_alive(self, jobs: tuple[Job, ...] = ()) -> bool | None:
        """Return True if the holder is alive, None if only its heartbeat can tell.

        `jobs` are the jobs of the caller.
        """
        here = (socket.gethostname(), place_of_this_process())
        if self.started and (self.host, self.place) == here:
            return start_of(self.pid) == self.started
        for kind, name, count in self.jobs:
            # Slurm ends a job before it restarts it, so an earlier start of the same job is dead.
            # For torchrun this does not hold: users choose the name (--rdzv-id), and two launches
            # may have the same one.
            if kind == "slurm" and any(job[:2] == (kind, name) and job[2] > count for job in jobs):
                return False
        return None


class LockHeld(Exception):
    """Raised when a living process holds a lock."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(str(holder))
        self.holder = holder


def end_this_process(text: str) -> None:
    """End this process at once after it lost a lock: it may not write anything any more."""
    print(text, file=sys.stderr, flush=True)
    os._exit(1)


class Lock:
    """A lock file at `path`; its folder must exist.

    `about` is the purpose and `jobs` are the jobs that the file stores. `this_process` is what the
    file says while this process holds the lock. If another process believes that this one is dead
    and takes over the lock, this process ends.
    """

    def __init__(self, path: Path, *, about: str = "", jobs: tuple[Job, ...] = ()) -> None:
        self.path = path.absolute()
        self._jobs = jobs
        self.this_process = Holder(
            token=uuid4().hex,
            host=socket.gethostname(),
            place=place_of_this_process(),
            pid=os.getpid(),
            started=start_of(os.getpid()) or "",
            jobs=jobs,
            about=about,
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
        )
        self._ended = threading.Event()
        self._heart: threading.Thread | None = None

    def take(self, say: Say = lambda text: None) -> None:
        """Take the lock.

        If the holder is on another machine, waits for its heartbeat and reports that by `say`.
        Raises LockHeld if a living process has the lock, OSError if the file cannot be written.
        """
        dead = ""
        while holder := self.try_to_take(dead):
            if holder.is_alive(self._jobs):
                raise LockHeld(holder)
            say(
                f"{self.path} is held by {holder}; waiting up to {BEAT * MISSED:.0f} s for its "
                "heartbeat"
            )
            dead = self._listen(holder)

    def wait(self, on_wait: Callable[[], None]) -> None:
        """Take the lock as soon as it is free; call `on_wait` once if it may be held now."""
        waiting = cache(on_wait)  # so that it is called once
        while True:
            try:
                return self.take(lambda text: waiting())
            except LockHeld:
                waiting()
                time.sleep(_NAP)

    def try_to_take(self, dead: str = "") -> Holder | None:
        """Take the lock if it is free or its holder is dead; otherwise return the holder.

        A holder whose token is `dead` counts as dead.
        """
        while not self._create(self.path):
            holder = read(self.path)
            if holder is None:
                continue
            if holder.token != dead and holder.is_alive(self._jobs) is not False:
                return holder
            if self._replace(holder):
                break
        self._heart = threading.Thread(target=self._beat, name="lock", daemon=True)
        self._heart.start()
        return None

    def release(self) -> None:
        """Release the lock; do nothing if it is not held."""
        if self._heart is None:
            return
        self._ended.set()
        self._heart.join()
        self._heart = None
        with suppress(OSError):
            holder = read(self.path)
            if holder and holder.token == self.this_process.token:
                self.path.unlink()

    def _create(self, path: Path) -> bool:
        """Create a file that names this process; return False if the file exists."""
        try:
            with open(path, "x") as file:
                file.write(self.this_process.model_dump_json())
        except FileExistsError:
            return False
        return True

    def _replace(self, dead: Holder) -> bool:
        """Take over a dead holder's lock; return False if another process did it first."""
        # Several processes may find the holder dead. The one that creates this file renames it over
        # the lock in one step. The file stays longer only if its creator was killed in between.
        claim = self.path.with_name(f"{self.path.name}.{dead.token}")
        deadline = time.monotonic() + BEAT * MISSED
        while not self._create(claim):
            if time.monotonic() > deadline:
                claim.unlink(missing_ok=True)
            time.sleep(0.01)
        now = read(self.path)
        if now is None or now.token != dead.token:
            claim.unlink()
            return False
        os.replace(claim, self.path)
        return True

    def _listen(self, holder: Holder) -> str:
        """Wait for a heartbeat of `holder`; return its token, or "" if the lock changed hands.

        Raises LockHeld if there is a heartbeat.
        """
        deadline = time.monotonic() + BEAT * MISSED
        while time.monotonic() < deadline:
            time.sleep(_NAP)
            now = read(self.path)
            if now is None or now.token != holder.token:
                return ""
            if now.beat != holder.beat:
                raise LockHeld(now)
        return holder.token

    def _beat(self) -> None:
        own = self.this_process
        number = 0
        while not self._ended.wait(BEAT):
            number += 1
            # A full disk or a file server that is briefly away must not end the process.
            with suppress(OSError):
                holder = read(self.path)
                if holder is None and self._create(self.path):
                    continue
                if holder is None or holder.token != own.token:
                    return end_this_process(
                        f"{self.path} was taken over by {holder or 'another process'} because "
                        "this process sent no heartbeat for too long; it ends without writing more"
                    )
                with open(self.path, "r+") as file:  # the text never becomes shorter
                    file.write(own.model_copy(update={"beat": number}).model_dump_json())


def read(path: Path) -> Holder | None:
    """Return the holder of the lock at `path`, or None.

    A damaged file counts as a holder without a heartbeat. So does an empty one, unless its creator
    writes to it at once.
    """
    deadline = time.monotonic() + _WRITTEN
    while True:
        try:
            text = path.read_text(errors="replace")
        except FileNotFoundError:
            return None
        if text or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    try:
        return Holder.model_validate_json(text)
    except ValidationError:
        token = f"damaged-{blake2b(text.encode(), digest_size=16).hexdigest()}"
        return Holder(token=token, host="?", place="?", pid=0, started="")


def place_of_this_process() -> str:
    """Return an id of this machine's boot and pid namespace; "" if there is none.

    It differs between two machines and between two containers of one machine.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def start_of(pid: int) -> str | None:
    """Return the start time of a process in kernel ticks; None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
