"""One holder at a time, on any file system, and a dead one never in the way (floor 0).

A lock is a file that its holder makes and then rewrites every `BEAT` seconds. Whether a holder
lives is known at once on its own machine, by its process; elsewhere by its heartbeat. It needs no
`flock`, no links and no exchange of two names, which network file systems may not have.

filelock's `SoftFileLease` (4.2) does not do: without an exchange of names (NFS) it never follows a
dead holder; it takes the lock of a living one on another machine of the same name, and of a stopped
one on its own; it waits for a zombie, and for ever at an empty file; it has no room for a job.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from uuid import uuid4

BEAT = 2.0  # seconds between two heartbeats
MISSED = 15  # heartbeats without which a holder on another machine is dead
_NAP = 0.25  # seconds between two looks at a lock

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
    """When the process was started, "" where only a heartbeat can tell; its pid may be another's
    later."""
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
        here = (socket.gethostname(), place_of_this_process())
        if self.started and (self.host, self.place) == here:
            return start_of(self.pid) == self.started
        for kind, name, count in self.jobs:
            # Slurm starts a job again after it has ended it. What a torchrun starts again may have
            # the name of another's: users choose it (--rdzv-id).
            if kind == "slurm" and any(
                mine[:2] == (kind, name) and mine[2] > count for mine in jobs
            ):
                return False
        return None


class LockHeld(Exception):
    """The error that a living process holds a lock."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(str(holder))
        self.holder = holder


def end_this_process(text: str) -> None:
    """End this process without cleaning up, after a lost lock: nothing more may be written."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
    os._exit(1)


class Lock:
    """The lock at `path`, whose folder must exist; `about` says what for, `jobs` under which.

    This process ends if another one takes it for dead and takes the lock over.
    """

    def __init__(self, path: Path, *, about: str = "", jobs: tuple[Job, ...] = ()) -> None:
        self.path, self._jobs = path.absolute(), jobs
        self._mine = Holder(
            token=uuid4().hex, host=socket.gethostname(), place=place_of_this_process(),
            pid=os.getpid(), started=start_of(os.getpid()) or "", jobs=jobs, about=about,
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
        )  # fmt: skip
        self._ended = threading.Event()
        self._heart: threading.Thread | None = None

    def take(self, say: Callable[[str], None] = lambda text: None) -> None:
        """Take the lock; raises LockHeld if a living process has it, OSError for want of a file.

        It waits for the heartbeat of a holder on another machine, and says so.
        """
        dead = ""
        while holder := self.try_to_take(dead):
            if holder.is_alive(self._jobs):
                raise LockHeld(holder)
            say(
                f"{self.path} is held by {holder}; waiting for its heartbeat, at most "
                f"{BEAT * MISSED:.0f} s"
            )
            dead = self._listen(holder)

    def wait(self, on_wait: Callable[[], None]) -> None:
        """Take the lock once nobody has it; `on_wait` is called if somebody has it now, or may."""
        waiting = cache(on_wait)  # called once
        while True:
            try:
                return self.take(lambda text: waiting())
            except LockHeld:
                waiting()
                time.sleep(_NAP)

    def try_to_take(self, dead: str = "") -> Holder | None:
        """Take the lock if it is free or its holder dead (as `dead`'s token is); else return it."""
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
        """Let go of the lock; without effect where it is not held."""
        if self._heart is None:
            return
        self._ended.set()
        self._heart.join()
        self._heart = None
        with suppress(OSError):
            holder = read(self.path)
            if holder and holder.token == self._mine.token:
                self.path.unlink()

    def _create(self, path: Path) -> bool:
        """Make a file that names this process; False if there is one."""
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        try:
            with open(file, "w") as out:
                out.write(text_of(self._mine))
        except OSError:  # a full disk
            path.unlink()
            raise
        return True

    def _replace(self, dead: Holder) -> bool:
        """Take over a dead holder's lock; False if another process has done it."""
        # Of all who find it dead, the one that makes this file replaces the lock by it, in one
        # step. It is there for longer only if its maker was killed at that.
        mine = self.path.with_name(f"{self.path.name}.{dead.token}")
        deadline = time.monotonic() + BEAT * MISSED
        while not self._create(mine):
            other = read(mine)
            if other and (other.is_alive() is False or time.monotonic() > deadline):
                mine.unlink(missing_ok=True)
            time.sleep(0.01)
        now = read(self.path)
        if now is None or now.token != dead.token:
            mine.unlink()
            return False
        os.replace(mine, self.path)
        return True

    def _listen(self, holder: Holder) -> str:
        """Wait for a sign of life; LockHeld if there is one. Gives the token if there is none."""
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
        mine, number = self._mine, 0
        while not self._ended.wait(BEAT):
            number += 1
            # A full disk or a server that is away for a moment is no reason to end.
            with suppress(OSError):
                holder = read(self.path)
                if holder is None and self._create(self.path):
                    continue
                if holder is None or holder.token != mine.token:
                    return end_this_process(
                        f"{self.path} was taken over by {holder or 'another process'}: this "
                        "process was silent for too long; it ends, and writes nothing more"
                    )
                with open(self.path, "r+") as file:
                    file.write(text_of(replace(mine, beat=number)))


def read(path: Path) -> Holder | None:
    """Return who holds the lock at `path`, None if nobody; a damaged file is a silent holder."""
    try:
        text = path.read_text(errors="replace")
        if not text:  # its holder is about to write it
            time.sleep(0.05)
            text = path.read_text(errors="replace")
    except FileNotFoundError:
        return None
    try:
        said = json.loads(text)
        jobs = tuple((str(k), str(n), int(c)) for k, n, c in said.pop("jobs"))
        return Holder(**{**said, "jobs": jobs})
    except (ValueError, TypeError, KeyError, AttributeError):
        token = f"damaged-{blake2b(text.encode(), digest_size=16).hexdigest()}"
        return Holder(token, host="?", place="?", pid=0, started="")


def text_of(holder: Holder) -> str:
    """The text of a lock's file, always of one length: a heartbeat overwrites the one before."""
    said = asdict(holder)
    beat = said.pop("beat")
    return f'{json.dumps(said)[:-1]}, "beat": {beat:12}}}\n'


def place_of_this_process() -> str:
    """What tells two machines apart, and two containers of one machine; "" where nothing does."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def start_of(pid: int) -> str | None:
    """When a process was started, by the kernel's count; None if there is only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
