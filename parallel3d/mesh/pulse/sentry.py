"""The process beside a rank that sees it die, stop or stand still, and reports (floor 0, no torch).

It needs nothing of its rank, which may be dead, stopped, or in native code for minutes: it asks the
system whether its parent lives, and reads the page that the two share. Where it is traced, a
debugger holds it: no fault. Started by `pulse.rank.begin`; ends with its rank.
"""

import json
import math
import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from parallel3d.mesh.pulse.court import Court
from parallel3d.mesh.pulse.judge import GONE, RUNS, STOPPED, TRACED, Judge, Limits, Report
from parallel3d.mesh.pulse.line import Line, connect
from parallel3d.mesh.pulse.page import Page, Verdict

LOOK = 1.0  # seconds between two looks at the rank
BEAT = 2.0  # seconds between two reports of a rank with nothing new
_REACH = 60.0  # seconds in which the judge must be reached
_GRACE = 5.0  # seconds that a rank has to end itself
_LINGER = 10.0  # seconds for which what a dead rank's sentry knows is passed on
_HELD = 3.0  # seconds in a debugger: not one that takes a sample of the stack (py-spy, strace)
_LONGEST_LOOK = 2.0  # seconds: more between two looks, and this machine slept


class SentryTask(NamedTuple):
    """What a rank tells its sentry at its start; `listener` is the judge's socket, or -1."""

    rank: int
    world_size: int
    host: str
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
        self._task, self._page = task, Page(task.page)
        self._limits = Limits(*task.limits)
        self._selector = selectors.DefaultSelector()
        self._start = self._looked = time.monotonic()
        self._line: Line | None = None
        self._court: Court | None = None
        self._sent: Report | None = None
        self._beat = self._silent = self._next = 0.0
        self._gone: float | None = None  # since when
        self._traced: float | None = None  # since when, until that is said
        self._deadline: float | None = None  # for a rank that is told to end
        self._speaks = self._first = False
        self._verdict, self._judges_rank = "", "its start"
        self._watch_parent()
        if task.listener >= 0:
            judge = Judge(self._limits, store="{}:{}".format(*task.store))
            self._judge = judge
            self._court = Court(
                socket.socket(fileno=task.listener), judge, rank=task.rank,
                world_size=task.world_size, token=task.token, selector=self._selector,
                on_verdict=self._take_verdict,
            )  # fmt: skip
            self._court.watch_store(*task.store)
            self._page.is_watched = True

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
            else:
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
            return GONE
        try:
            # After the name, which may hold anything, in brackets.
            stat = Path(f"/proc/{self._task.parent}/stat").read_bytes()
            letter = stat.rpartition(b")")[2].split()[0]
        except (OSError, IndexError):  # no /proc: a rank that stops is not seen
            return RUNS
        return {b"T": STOPPED, b"t": TRACED}.get(letter, RUNS)

    def _report(self, now: float) -> None:
        """Report what is new at once, and else at each beat."""
        page, state, doing = self._page, self._state(), self._page.doing
        if state == GONE and self._gone is None:
            self._gone = now
        self._say_held(state, now)
        report = Report(
            self._task.host, state, doing.text, doing.since, doing.waits, page.limit, page.left,
            page.reason,
        )  # fmt: skip
        if self._court:
            self._judge.hear(self._task.rank, report)
            if now >= self._beat:
                self._beat = now + BEAT
                self._court.beat(doing.text)
            return
        if self._line is None and not self._verdict:
            self._reach(report, now)
        same = self._sent and (report.state, report.left) == (self._sent.state, self._sent.left)
        if self._line and self._line.is_open and not (same and now < self._beat):
            self._beat, self._sent = now + BEAT, report
            self._line.send(self._message(report))

    def _say_held(self, state: str, now: float) -> None:
        """The others' collectives know of no debugger: they end where a limit is set."""
        if state != TRACED:
            self._traced = None
        elif self._traced is None:
            self._traced = now
        elif now - self._traced >= _HELD and self._page.limit:
            self._traced = math.inf  # once
            _say(
                f"rank {self._task.rank} on {self._task.host} is held by a debugger: who waits for "
                f"it in a collective fails after {self._page.limit:.0f} s; "
                "parallel3d.train.timeout_seconds = 0 lets all wait for ever"
            )

    def _message(self, report: Report) -> dict[str, Any]:
        return {"token": self._task.token, "rank": self._task.rank, "report": report}

    def _reach(self, report: Report, now: float) -> None:
        """Find the judge: it knows the token, wherever a name has led."""
        task = self._task
        for host in dict.fromkeys(task.hosts):
            if connection := connect([host], task.port):
                line = Line(connection)
                line.send(self._message(report))
                connection.setblocking(True)
                connection.settimeout(3.0)
                with suppress(OSError, ValueError, TypeError, KeyError):
                    # It stays there to be read, as a verdict may stand behind it.
                    greeting = connection.recv(2**12, socket.MSG_PEEK).partition(b"\n")[0]
                    if json.loads(greeting)["token"] == task.token:
                        connection.setblocking(False)
                        self._page.is_watched = True
                        self._line, self._sent, self._beat = line, report, now + BEAT
                        self._selector.register(connection, selectors.EVENT_READ, self._hear)
                        return
                line.close()
        if now - self._start > _REACH:
            self._verdict = "there is no judge"
            _say(
                f"WARNING: rank {task.rank} on {task.host} cannot reach rank 0's watch at "
                f"{' or '.join(task.hosts)}, port {task.port}, in {_REACH:.0f} s: if a rank dies, "
                "this one hears of it by its timeouts only"
            )

    def _hear(self) -> None:
        assert self._line
        for said in self._line.receive():
            self._silent = 0.0
            if "verdict" in said:
                self._take_verdict(said["verdict"], said["speaks"], said["blamed"])
            else:
                self._judges_rank = said["doing"] or self._judges_rank
                self._first = said["speaks"]
        if not self._line.is_open:
            self._selector.unregister(self._line.descriptor)

    def _look_at_judge(self, now: float) -> None:
        """Its machine may be gone, and the process group's store with it."""
        self._silent += min(now - self._looked, _LONGEST_LOOK)
        if self._line is None or self._verdict or self._gone or self._page.left is not None:
            return
        fault = ""
        if not self._line.is_open:
            fault = f'died at "{self._judges_rank}": killed, or crashed, and its sentry with it'
        elif self._silent > self._limits.silent:
            silent = f'has been silent for {self._silent:.0f} s at "{self._judges_rank}"'
            fault = f"{silent}: its machine or its network is down"
        if fault:
            host = self._task.hosts[-1]
            self._take_verdict(f"rank 0 on {host} {fault}", self._first, False)

    def _take_verdict(self, text: str, speaks: bool, blamed: bool) -> None:
        if self._verdict:
            return
        self._verdict, self._speaks = text, speaks
        self._page.judge(Verdict(text, speaks))
        # One that is stopped cannot end itself, and would hold its memory for ever.
        is_stopped = blamed and self._state() == STOPPED
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
    task = SentryTask(*json.load(sys.stdin))
    if task.listener >= 0:
        with suppress(ImportError, ValueError, OSError):
            import resource

            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    Sentry(task).run()
