"""Where the judge hears the sentries: the end that all their connections lead to (floor 0)."""

import hmac
import selectors
import socket
from collections.abc import Callable
from typing import Any

from parallel3d.mesh.pulse.judge import GONE, Judge, Report
from parallel3d.mesh.pulse.line import Line, connect

_LOOK = 0.5  # seconds between two looks at all ranks, where there is nothing new


class Court:
    """The judge's connections: takes the lines of other sentries, and answers them.

    `selector` wakes its owner, who calls what stands beside a file that is ready. `on_verdict`
    hears the verdict for the rank of this process: its text, whether it speaks, whether it is the
    one to blame.
    """

    def __init__(
        self,
        listener: socket.socket,
        judge: Judge,
        *,
        rank: int,
        world_size: int,
        token: str,
        selector: selectors.BaseSelector,
        on_verdict: Callable[[str, bool, bool], None],
    ) -> None:
        self._listener, self._judge, self._rank = listener, judge, rank
        self._token, self._selector, self._on_verdict = token, selector, on_verdict
        self._awaited = set(range(world_size)) - {rank}
        self._lines: dict[Line, int | None] = {}
        self._verdict = ""
        self._blamed: int | None = None
        self._next = 0.0
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._take)

    @property
    def is_empty(self) -> bool:
        """Whether every sentry has come and gone."""
        return not self._awaited and self.is_alone

    @property
    def is_alone(self) -> bool:
        """Whether no sentry is there now; some may never have come."""
        return all(rank is None for rank in self._lines.values())

    def watch_store(self, host: str, port: int) -> None:
        """Notice when the process group's store at an address goes.

        An open connection is enough: the system of the other end closes it with the process.
        """
        if connection := connect([host], port):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 5)):
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            line = Line(connection)

            def look() -> None:
                line.receive()
                if not line.is_open:
                    self._selector.unregister(line.descriptor)
                    self._judge.lose_store()

            self._selector.register(line.descriptor, selectors.EVENT_READ, look)

    def beat(self, doing: str) -> None:
        """Show every sentry that the judge lives, and what its own rank does."""
        speakers = self._judge.speakers(blamed=self._rank)
        for line, rank in list(self._lines.items()):
            if rank is not None:
                said = {"token": self._token, "doing": doing, "speaks": rank in speakers}
                self._answer(line, said)

    def sit(self, now: float) -> None:
        """Find the verdict, if it is time for one, and tell every sentry, once.

        It takes time for each rank, so it is not sought at each message of one.
        """
        if self._verdict or not (self._judge.news or now >= self._next):
            return
        self._next = now + _LOOK
        self._verdict, self._blamed = self._judge.verdict(now)
        if not self._verdict:
            return
        speakers = self._judge.speakers(self._blamed)
        for line, rank in list(self._lines.items()):
            if rank is not None:
                self._answer(line, self._sentence(rank, rank in speakers))
        speaks, blamed = self._rank in speakers, self._rank == self._blamed
        self._on_verdict(self._verdict, speaks, blamed)

    def _take(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone, or there are too many files
            return
        line = Line(connection)
        self._lines[line] = None
        self._selector.register(line.descriptor, selectors.EVENT_READ, lambda: self._hear(line))

    def _hear(self, line: Line) -> None:
        for said in line.receive():
            self._hear_one(line, said)
        self._forget_closed(line)

    def _hear_one(self, line: Line, said: Any) -> None:
        token = said.get("token") if isinstance(said, dict) else None
        if not isinstance(token, str) or not hmac.compare_digest(token, self._token):
            line.close()  # a stranger
            return
        rank, report = said["rank"], Report(*said["report"])
        if self._lines[line] is None:  # it waits to hear that it has come to the right place
            line.send({"token": self._token, "doing": "", "speaks": False})
            if self._verdict:
                line.send(self._sentence(rank, speaks=False))
        self._awaited.discard(rank)
        self._lines[line] = rank
        self._judge.hear(rank, report)
        if report.state == GONE:
            line.close()

    def _sentence(self, rank: int, speaks: bool) -> dict[str, Any]:
        blamed = rank == self._blamed
        return {"token": self._token, "verdict": self._verdict, "speaks": speaks, "blamed": blamed}

    def _answer(self, line: Line, said: dict[str, Any]) -> None:
        line.send(said)
        self._forget_closed(line)

    def _forget_closed(self, line: Line) -> None:
        if line.is_open or line not in self._lines:
            return
        self._selector.unregister(line.descriptor)
        rank = self._lines.pop(line)
        if rank is not None:
            self._judge.lose(rank)
