"""The process beside a rank that sees it die, stop or stand still, and reports (floor 0, no torch).

It needs nothing of its rank, which may be dead, stopped, or in native code for minutes: it asks the
system about its parent, and reads the page that the two share. A traced rank is no fault. Started
by `pulse.rank.begin`; ends with its rank.
"""

import json
import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from parallel3d.mesh.pulse import judge
from parallel3d.mesh.pulse.court import BEAT, Court, Line, connect
from parallel3d.mesh.pulse.judge import Judge, Limits, Report
from parallel3d.mesh.pulse.page import Verdict, open_page

LOOK = 1.0  # seconds between two looks at the rank
_REACH = 60.0  # seconds in which the judge must be reached
_ANSWER = 3.0  # seconds in which the judge answers a call
_GRACE = 5.0  # seconds that a rank has to end itself
_LINGER = 10.0  # seconds for which what a dead rank's sentry knows is passed on


class SentryTask(NamedTuple):
    """The task that a rank gives its sentry; `listener` is the judge's socket, or -1."""

    rank: int
    world_size: int
    parent: int
    page: int
    token: str
    limits: list[float]
    hosts: list[str]
    port: int
    listener: int
    store: tuple[str, int]


class Sentry:
    """The sentry of one rank, its parent process, on which it reports until that is gone."""

    def __init__(self, task: SentryTask) -> None:
        self._task, self._page = task, open_page(task.page)
        self._host, self._limits = socket.gethostname(), Limits(*task.limits)
        self._selector = selectors.DefaultSelector()
        self._start = self._looked = time.monotonic()
        self._line: Line | None = None
        self._called = 0.0  # when the judge was called, which has not answered yet
        self._calls = 0
        self._sent: Report | None = None
        self._beat = self._silent = self._next = 0.0
        self._gone: float | None = None  # since when
        self._deadline: float | None = None  # for a rank that is told to end
        self._speaks = self._first = False
        self._verdict, self._judges_rank = "", "its start"
        self._watch_parent()
        self._court: Court | None = None
        if task.listener >= 0:
            self._court = Court(
                socket.socket(fileno=task.listener),
                Judge(self._limits, store="{}:{}".format(*task.store)),
                world_size=task.world_size, token=task.token, selector=self._selector,
            )  # fmt: skip
            self._court.watch_store(*task.store)

    def run(self) -> None:
        """Report until the rank is gone, and everyone who must know of it does."""
        while not self._is_done():
            for key, _ in self._selector.select(max(0.0, self._next - time.monotonic())):
                key.data()
            now = time.monotonic()
            if now >= self._next:
                self._next = now + LOOK
                self._report(now)
            if self._court:
                self._court.sit(now)
            self._look_at_judge(now)
            self._enforce(now)
            self._looked = now

    def _watch_parent(self) -> None:
        """Wake at once when it ends, where the system can do that."""
        with suppress(AttributeError, OSError):
            descriptor = os.pidfd_open(self._task.parent)

            def ends() -> None:
                self._selector.unregister(descriptor)
                self._next = 0.0

            self._selector.register(descriptor, selectors.EVENT_READ, ends)

    def _state(self) -> str:
        if os.getppid() != self._task.parent:
            return judge.GONE
        try:
            # After the name, which may hold anything, in brackets.
            stat = Path(f"/proc/{self._task.parent}/stat").read_bytes()
            letter = stat.rpartition(b")")[2].split()[0]
        except (OSError, IndexError):  # no /proc: a rank that stops is not seen
            return judge.RUNS
        return {b"T": judge.STOPPED, b"t": judge.TRACED}.get(letter, judge.RUNS)

    def _report(self, now: float) -> None:
        """Report what is new at once, and else at each beat."""
        page, state = self._page, self._state()
        if state == judge.GONE and self._gone is None:
            self._gone = now
        if self._line and not page.is_watched and now - self._called > _ANSWER:
            self._hang_up()
        if self._line is None and not self._verdict:
            self._call(now)
        report = Report(self._host, state, *page.doing, page.limit, page.left, page.reason)
        same = self._sent and (report.state, report.left) == (self._sent.state, self._sent.left)
        if self._line and self._line.is_open and not (same and now < self._beat):
            self._beat, self._sent = now + BEAT, report
            self._line.send({"token": self._task.token, "rank": self._task.rank, "report": report})

    def _call(self, now: float) -> None:
        """Call the judge by its next name; whoever answers must know the token."""
        task = self._task
        host = task.hosts[self._calls % len(task.hosts)]
        self._calls += 1
        if line := connect(host, task.port):
            self._line, self._called, self._sent = line, now, None
            self._selector.register(line.descriptor, selectors.EVENT_READ, self._hear)
        if now - self._start > _REACH:
            self._verdict = "there is no judge"
            _say(
                f"WARNING: rank {task.rank} on {self._host} cannot reach rank 0's watch at "
                f"{' or '.join(task.hosts)}, port {task.port}, in {_REACH:.0f} s: if a rank dies, "
                "this one hears of it by its timeouts only"
            )

    def _hear(self) -> None:
        assert self._line
        for said in self._line.receive():
            if not isinstance(said, dict) or said.get("token") != self._task.token:
                return self._hang_up()
            self._page.is_watched, self._silent = True, 0.0
            if said["verdict"]:
                verdict = Verdict(said["verdict"], said["speaks"], said["code"])
                self._take_verdict(verdict, said["blamed"])
            else:
                self._judges_rank = said.get("doing") or self._judges_rank
                self._first = said["speaks"]
        if not self._line.is_open:
            self._hang_up()

    def _hang_up(self) -> None:
        """Let go of a line; one that was never the judge's is forgotten."""
        assert self._line
        self._selector.unregister(self._line.descriptor)
        self._line.close()
        if not self._page.is_watched:
            self._line = None

    def _look_at_judge(self, now: float) -> None:
        """Its machine may be gone, and the process group's store with it."""
        self._silent += min(now - self._looked, judge.LONGEST_LOOK)
        if not self._page.is_watched or self._verdict or self._gone or self._page.left is not None:
            return
        fault = ""
        if not (self._line and self._line.is_open):
            fault = f'died at "{self._judges_rank}": killed, or crashed, and its sentry with it'
        elif self._silent > self._limits.silent:
            silent = f'has been silent for {self._silent:.0f} s at "{self._judges_rank}"'
            fault = f"{silent}: its machine or its network is down"
        if fault:
            text = f"rank 0 on {self._task.hosts[-1]} {fault}"
            self._take_verdict(Verdict(text, self._first, judge.FAILED), False)

    def _take_verdict(self, verdict: Verdict, blamed: bool) -> None:
        if self._verdict:
            return
        self._verdict, self._speaks = verdict.text, verdict.speaks
        self._page.judge(verdict)
        # One that is stopped cannot end itself, and would hold its memory for ever.
        is_stopped = blamed and self._state() == judge.STOPPED
        self._deadline = time.monotonic() + (0.0 if is_stopped else _GRACE)

    def _enforce(self, now: float) -> None:
        """End a rank that was told to, and cannot: no Python runs in it."""
        if self._deadline is None or now < self._deadline or self._gone is not None:
            return
        if self._page.left is None and os.getppid() == self._task.parent:
            if self._speaks:
                _say(self._verdict)
            os.kill(self._task.parent, signal.SIGKILL)
            self._deadline = None

    def _is_done(self) -> bool:
        if self._gone is None:
            return False
        waited = time.monotonic() - self._gone
        if self._court:
            # While others run, there is something to judge.
            # Those that are still to come must hear of it, too; but they may never come.
            nobody = bool(self._verdict) or self._court.is_alone
            return self._court.is_empty or (nobody and waited > _REACH)
        if self._line is None:
            return self._page.left is not None or bool(self._verdict) or waited > _LINGER
        return not self._line.is_open or waited > _LINGER


def _say(text: str) -> None:
    with suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def main() -> None:
    """Read the sentry's task from standard input, and do it."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)  # it ends with its rank
    Sentry(SentryTask(*json.load(sys.stdin))).run()
