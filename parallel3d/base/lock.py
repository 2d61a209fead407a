"""One holder at a time, on any file system, and a dead one never in the way (floor 0).

A lock is a file that appears with its contents (`link`, which network file systems keep atomic;
`flock` they may not have) and that its holder rewrites every `BEAT` seconds. Whether a holder
lives is known at once on its own machine, by its process; elsewhere by its heartbeat.
"""

import fcntl
import glob
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from parallel3d.base.holder import Holder, Job, place_of_this_process, read, start_of, text_of

BEAT = 2.0  # seconds between two heartbeats
MISSED = 15  # heartbeats without which a holder on another machine is dead
_NAP = 0.25  # seconds between two looks at a lock
_SETTLE = 0.2  # seconds after which a lock is looked at again, where nothing guards its taking


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

    `on_lost` hears, in a thread, that another process has taken it over: this one was silent for
    so long that it was taken for dead.
    """

    def __init__(
        self,
        path: Path,
        *,
        about: str = "",
        jobs: tuple[Job, ...] = (),
        on_lost: Callable[[str], None] = end_this_process,
    ) -> None:
        self.path, self._jobs, self._on_lost = path.absolute(), jobs, on_lost
        self._mine = Holder(
            token=uuid4().hex, host=socket.gethostname(), place=place_of_this_process(),
            pid=os.getpid(), started=start_of(os.getpid()) or "", jobs=jobs, about=about,
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
        )  # fmt: skip
        self._ended = threading.Event()
        self._heart: threading.Thread | None = None

    def take(self, say: Callable[[str], None] = lambda text: None) -> None:
        """Take the lock; LockHeld if a living process has it, OSError where no file can be made.

        Of a holder on another machine it waits for a heartbeat, and says so.
        """
        dead, said = "", False
        while holder := self.try_to_take(dead):
            if holder.is_alive(self._jobs):
                raise LockHeld(holder)
            if not said:
                said = True
                say(
                    f"{self.path} is held by {holder}; waiting for its heartbeat, at most "
                    f"{BEAT * MISSED:.0f} s"
                )
            dead = self._listen(holder)

    def wait(self, on_wait: Callable[[], None]) -> None:
        """Take the lock once nobody has it; `on_wait` is called if somebody has it now, or may."""
        nap, said = 0.0, False

        def say(text: str = "") -> None:
            nonlocal said
            if not said:
                said = True
                on_wait()

        while True:
            try:
                return self.take(say)
            except LockHeld:
                say()
                nap = min(2 * nap or 0.001, _NAP)
                time.sleep(nap)

    def try_to_take(self, dead: str = "") -> Holder | None:
        """Take the lock if it is free, or its holder dead; else give the holder, without waiting.

        `dead` is the token of a holder that is known to be dead.
        """
        with _alone_in(self.path.parent) as alone:
            while True:
                holder = read(self.path)
                if holder is None:
                    if self._create():
                        break
                elif holder.token != dead and holder.is_alive(self._jobs) is not False:
                    return holder
                else:
                    self._bury(holder)
            if not alone:
                time.sleep(_SETTLE)
                holder = read(self.path)
                if holder is None or holder.token != self._mine.token:
                    return holder or self.try_to_take(dead)
        self._heart = threading.Thread(target=self._beat, name="lock", daemon=True)
        self._heart.start()
        self._sweep()
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

    def _sweep(self) -> None:
        """Remove what processes left that were killed as they took or buried this lock."""
        for path in self.path.parent.glob(f"{glob.escape(self.path.name)}.*"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > BEAT * MISSED:
                    path.unlink()

    def _create(self) -> bool:
        """Make the file with its contents; False if there is one."""
        own = self.path.with_name(f"{self.path.name}.{self._mine.token}")
        text = text_of(self._mine)
        try:
            own.write_text(text)
            try:
                os.link(own, self.path)
            except FileExistsError:
                return False
            except OSError:
                # The reply of a network file system can be lost although it was done.
                if own.stat().st_nlink != 2:
                    return _create_alone(self.path, text)
            return True
        finally:
            own.unlink(missing_ok=True)

    def _bury(self, dead: Holder) -> None:
        """Remove a dead holder's file, and no other that has taken its place meanwhile."""
        grave = self.path.with_name(f"{self.path.name}.{self._mine.token}")
        with suppress(FileNotFoundError):
            os.rename(self.path, grave)
            buried = read(grave)
            if buried and buried.token != dead.token:
                with suppress(FileExistsError):
                    os.link(grave, self.path)
            grave.unlink()

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
                if holder is None and self._create():
                    continue
                if holder is None or holder.token != mine.token:
                    return self._on_lost(
                        f"{self.path} was taken over by {holder or 'another process'}: this "
                        "process was silent for too long; it ends, and writes nothing more"
                    )
                with open(self.path, "r+") as file:
                    file.write(text_of(replace(mine, beat=number)))


def _create_alone(path: Path, text: str) -> bool:
    """Make the file where there are no links; False if there is one."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    with open(file, "w") as out:
        out.write(text)
    return True


@contextmanager
def _alone_in(folder: Path) -> Iterator[bool]:
    """Whether no other process of this machine is taking a lock in `folder` now.

    False where the file system has no `flock`.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield _flocked(descriptor)
    finally:
        os.close(descriptor)


def _flocked(descriptor: int) -> bool:
    for _ in range(40):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:  # somebody is at it, for some microseconds
            time.sleep(0.05)
        except OSError:
            return False
    return False
