"""Where the judge hears the sentries: the end that all their connections lead to (floor 0).

Each message is an object as a line of JSON over TCP, between processes that know one secret.
"""

import hmac
import json
import selectors
import socket
from contextlib import suppress
from typing import Any

from parallel3d.mesh.pulse.judge import GONE, Finding, Judge, Report

_LOOK = 0.5  # seconds between two looks at all ranks, where there is nothing new
BEAT = 2.0  # seconds between two signs of life
MOST_BYTES = 2**14  # of a line: nobody's words are longer


class Line:
    """One end of a connection, which never waits for the other end."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self.descriptor = connection, connection.fileno()
        connection.setblocking(False)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._read = b""
        self.is_open = True

    def send(self, value: Any) -> None:
        """Send one object; an end that does not read for long counts as gone."""
        data = json.dumps(value).encode() + b"\n"
        if not self.is_open:
            return
        try:
            if self.socket.send(data) < len(data):
                self.close()
        except OSError:
            self.close()

    def receive(self) -> list[Any]:
        """Take the objects that have come; closes if the other end is gone or sends rot."""
        try:
            while data := self.socket.recv(MOST_BYTES):
                self._read += data
                if len(self._read) > MOST_BYTES and b"\n" not in self._read:
                    break
            self.close()
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        *lines, self._read = self._read.split(b"\n")
        try:
            return [json.loads(line) for line in lines]
        except ValueError:
            self.close()
            return []

    def close(self) -> None:
        """Close this end of the connection."""
        if self.is_open:
            self.is_open = False
            self.socket.close()


def connect(host: str, port: int) -> Line | None:
    """Connect to a host; None if it does not answer soon."""
    with suppress(OSError):
        return Line(socket.create_connection((host, port), timeout=3.0))
    return None


def listen() -> socket.socket:
    """Open a socket that takes connections on a free port, of IPv4 and, if there is any, IPv6."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True
            )
    return socket.create_server(("", 0), backlog=4096)


class Court:
    """The judge's connections: takes the lines of the sentries, and answers them.

    `selector` wakes its owner, who calls what stands beside a file that is ready.
    """

    def __init__(
        self,
        listener: socket.socket,
        judge: Judge,
        *,
        world_size: int,
        token: str,
        selector: selectors.BaseSelector,
    ) -> None:
        self._listener, self._judge = listener, judge
        self._token, self._selector = token, selector
        self._awaited = set(range(world_size))
        self._lines: dict[Line, int | None] = {}
        self._finding = Finding()
        self._next = self._beat = 0.0
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._take)

    @property
    def is_empty(self) -> bool:
        """True once every sentry has come and gone."""
        return not self._awaited and self.is_alone

    @property
    def is_alone(self) -> bool:
        """True if no sentry is there now; some may never have come."""
        return all(rank is None for rank in self._lines.values())

    def watch_store(self, host: str, port: int) -> None:
        """Notice when the process group's store at an address goes.

        An open connection is enough: the system of the other end closes it with the process.
        """
        if not (line := connect(host, port)):
            return
        line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 5)):
            if hasattr(socket, name):
                line.socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

        def look() -> None:
            line.receive()
            if not line.is_open:
                self._selector.unregister(line.descriptor)
                self._judge.lose_store()

        self._selector.register(line.descriptor, selectors.EVENT_READ, look)

    def sit(self, now: float) -> None:
        """Show the sentries that the judge lives; tell them the verdict, once, if there is one.

        It takes time for each rank, so it is not sought at each message of one.
        """
        if now >= self._beat:
            self._beat = now + BEAT
            first = self._judge.ranks.get(0)
            doing = first.report.doing if first else ""
            self._tell_all({"doing": doing}, self._judge.speakers(blamed=0))
        if self._finding.text or not (self._judge.news or now >= self._next):
            return
        self._next = now + _LOOK
        self._finding = self._judge.verdict(now)
        if self._finding.text:
            self._tell_all({}, self._judge.speakers(self._finding.blamed))

    def _tell_all(self, said: dict[str, Any], speakers: set[int]) -> None:
        for line, rank in list(self._lines.items()):
            if rank is not None:
                line.send(said | self._sentence(rank, rank in speakers))
                self._forget_closed(line)

    def _sentence(self, rank: int, speaks: bool) -> dict[str, Any]:
        """The message to a rank's sentry; its "verdict" is empty while the run goes on."""
        text, blamed, code = self._finding
        is_blamed = rank == blamed
        return {
            "token": self._token, "verdict": text, "speaks": speaks, "blamed": is_blamed,
            "code": code,
        }  # fmt: skip

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
            line.send(self._sentence(rank, speaks=False))
        self._awaited.discard(rank)
        self._lines[line] = rank
        self._judge.hear(rank, report)
        if report.state == GONE:
            line.close()

    def _forget_closed(self, line: Line) -> None:
        if line.is_open or line not in self._lines:
            return
        self._selector.unregister(line.descriptor)
        rank = self._lines.pop(line)
        if rank is not None:
            self._judge.lose(rank)
