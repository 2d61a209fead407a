"""The process beside a rank that sees it die, stop or stand still, and reports (floor 0, no torch).

The rank may be dead, stopped, or in native code for minutes, so the sentry does not need its help:
it asks the system about its parent and reads the page that the two share. A traced rank is no
fault. Started by `pulse.rank.begin`; ends with its rank.
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

from parallel3d.mesh.pulse import arbiter
from parallel3d.mesh.pulse.arbiter import Arbiter, Limits, Report
from parallel3d.mesh.pulse.listener import BEAT, Line, Listener, connect
from parallel3d.mesh.pulse.page import Outcome, open_page

LOOK = 1.0  # seconds between two looks at the rank
_REACH = 60.0  # seconds in which the arbiter must be reached
_ANSWER = 3.0  # seconds in which the arbiter must answer a call
_GRACE = 5.0  # seconds for a rank to end itself
_LINGER = 10.0  # seconds for which a dead rank's sentry still reports


class SentryTask(NamedTuple):
    """The input of a sentry, which reads it as JSON."""

    rank: int
    world_size: int
    parent: int
    """The process id of the rank."""
    page: int
    """The descriptor of the page that it shares with the rank."""
    token: str
    """The secret that all messages bear."""
    limits: list[float]
    """The fields of `Limits`."""
    hosts: list[str]
    """Rank 0's host names, the one to be shown last."""
    port: int
    """The arbiter's port."""
    listener: int
    """The descriptor of the arbiter's socket in rank 0's sentry; -1 in the others."""
    store: tuple[str, int]
    """Host and port of the process group's store."""


class Sentry:
    """The sentry of one rank, its parent process; it reports until the rank is gone."""

    def __init__(self, task: SentryTask) -> None:
        self._task = task
        self._page = open_page(task.page)
        self._host = socket.gethostname()
        self._limits = Limits(*task.limits)
        self._selector = selectors.DefaultSelector()
        self._start = self._looked = time.monotonic()
        self._line: Line | None = None
        self._called = 0.0  # time of the last call to the arbiter
        self._calls = 0
        self._sent: Report | None = None
        self._beat = self._silent = self._next = 0.0
        self._gone: float | None = None  # time at which the rank was gone
        self._deadline: float | None = None  # for a rank that was told to end
        self._speaks = self._first = False
        self._outcome = ""
        self._rank_0_does = "its start"
        self._watch_parent()
        self._listener: Listener | None = None
        if task.listener >= 0:
            self._listener = Listener(
                socket.socket(fileno=task.listener),
                Arbiter(self._limits, store="{}:{}".format(*task.store)),
                world_size=task.world_size,
                token=task.token,
                selector=self._selector,
            )
            self._listener.watch_store(*task.store)

    def run(self) -> None:
        """Report until the rank is gone and all processes that need to know have been told."""
        while not self._is_done():
            for key, _ in self._selector.select(max(0.0, self._next - time.monotonic())):
                key.data()
            now = time.monotonic()
            if now >= self._next:
                self._next = now + LOOK
                self._report(now)
            if self._listener:
                self._listener.serve(now)
            self._look_at_arbiter(now)
            self._enforce(now)
            self._looked = now

    def _watch_parent(self) -> None:
        """Wake at once when the rank ends, if the system supports that."""
        with suppress(AttributeError, OSError):
            descriptor = os.pidfd_open(self._task.parent)

            def ends() -> None:
                self._selector.unregister(descriptor)
                self._next = 0.0

            self._selector.register(descriptor, selectors.EVENT_READ, ends)

    def _state(self) -> str:
        if os.getppid() != self._task.parent:
            return arbiter.GONE
        try:
            # The state follows the name, which is in brackets and may contain anything.
            stat = Path(f"/proc/{self._task.parent}/stat").read_bytes()
            letter = stat.rpartition(b")")[2].split()[0]
        except (OSError, IndexError):  # no /proc: stopped ranks are not detected
            return arbiter.RUNS
        return {b"T": arbiter.STOPPED, b"t": arbiter.TRACED}.get(letter, arbiter.RUNS)

    def _report(self, now: float) -> None:
        """Report changes at once, and otherwise every two seconds."""
        page = self._page
        state = self._state()
        if state == arbiter.GONE and self._gone is None:
            self._gone = now
        if self._line and not page.is_watched and now - self._called > _ANSWER:
            self._hang_up()
        if self._line is None and not self._outcome:
            self._call(now)
        own = (*page.doing, page.limit, page.left, page.reason, *page.device)
        report = Report(self._host, state, *own)
        same = self._sent and (report.state, report.left) == (self._sent.state, self._sent.left)
        if self._line and self._line.is_open and not (same and now < self._beat):
            self._beat = now + BEAT
            self._sent = report
            self._line.send({"token": self._task.token, "rank": self._task.rank, "report": report})

    def _call(self, now: float) -> None:
        """Connect to the arbiter by its next name; whoever answers must know the token."""
        task = self._task
        host = task.hosts[self._calls % len(task.hosts)]
        self._calls += 1
        if line := connect(host, task.port):
            self._line = line
            self._called = now
            self._sent = None
            self._selector.register(line.descriptor, selectors.EVENT_READ, self._receive)
        if now - self._start > _REACH:
            self._outcome = "there is no arbiter"
            _print(
                f"WARNING: rank {task.rank} on {self._host} did not reach rank 0's watch at "
                f"{' or '.join(task.hosts)}, port {task.port}, in {_REACH:.0f} s: if a rank dies, "
                "this one notices only by its timeouts"
            )

    def _receive(self) -> None:
        assert self._line
        for message in self._line.receive():
            if not isinstance(message, dict) or message.get("token") != self._task.token:
                return self._hang_up()
            self._page.is_watched = True
            self._silent = 0.0
            if message["outcome"]:
                outcome = Outcome(message["outcome"], message["speaks"], message["code"])
                self._take_outcome(outcome, message["blamed"])
            else:
                self._rank_0_does = message.get("doing") or self._rank_0_does
                self._first = message["speaks"]
        if not self._line.is_open:
            self._hang_up()

    def _hang_up(self) -> None:
        """Close the line to the arbiter; call again if the arbiter has never answered."""
        assert self._line
        self._selector.unregister(self._line.descriptor)
        self._line.close()
        if not self._page.is_watched:
            self._line = None

    def _look_at_arbiter(self, now: float) -> None:
        """Detect that the arbiter's machine, and with it perhaps the store, is gone."""
        self._silent += min(now - self._looked, arbiter.LONGEST_LOOK)
        if not self._page.is_watched or self._outcome or self._gone or self._page.left is not None:
            return
        fault = ""
        if not (self._line and self._line.is_open):
            fault = f'died at "{self._rank_0_does}": killed, or crashed, and its sentry with it'
        elif self._silent > self._limits.silent:
            silent = f'has been silent for {self._silent:.0f} s at "{self._rank_0_does}"'
            fault = f"{silent}: its machine or its network is down"
        if fault:
            text = f"rank 0 on {self._task.hosts[-1]} {fault}"
            self._take_outcome(Outcome(text, self._first, arbiter.FAILED), False)

    def _take_outcome(self, outcome: Outcome, blamed: bool) -> None:
        if self._outcome:
            return
        self._outcome = outcome.text
        self._speaks = outcome.speaks
        self._page.end(outcome)
        # A stopped rank cannot end itself and would keep its memory for ever.
        is_stopped = blamed and self._state() == arbiter.STOPPED
        self._deadline = time.monotonic() + (0.0 if is_stopped else _GRACE)

    def _enforce(self, now: float) -> None:
        """Kill a rank that was told to end and cannot, because no Python runs in it."""
        if self._deadline is None or now < self._deadline or self._gone is not None:
            return
        if self._page.left is None and os.getppid() == self._task.parent:
            if self._speaks:
                _print(self._outcome)
            os.kill(self._task.parent, signal.SIGKILL)
            self._deadline = None

    def _is_done(self) -> bool:
        if self._gone is None:
            return False
        waited = time.monotonic() - self._gone
        if self._listener:
            # Stay while other sentries are connected. Those still to come must be told as well,
            # but they may never come.
            nobody_left = bool(self._outcome) or self._listener.is_alone
            return self._listener.is_empty or (nobody_left and waited > _REACH)
        if self._line is None:
            return self._page.left is not None or bool(self._outcome) or waited > _LINGER
        return not self._line.is_open or waited > _LINGER


def _print(text: str) -> None:
    with suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def main() -> None:
    """Read the sentry's task from standard input and run it."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)  # the sentry ends with its rank
    Sentry(SentryTask(*json.load(sys.stdin))).run()
