"""The end of all connections of the sentries, where the arbiter receives them (floor 0).

Each message is a JSON object on one line over TCP, between processes that share a secret.
"""

import hmac
import json
import selectors
import socket
from contextlib import suppress
from typing import Any

from parallel3d.mesh.pulse.arbiter import GONE, Arbiter, Finding, Report

_LOOK = 0.5  # seconds between two looks at all ranks, while nothing changes
BEAT = 2.0  # seconds between two signs of life
MOST_BYTES = 2**14  # no line is longer


class Line:
    """One end of a connection, which never waits for the other end."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.descriptor = connection.fileno()
        connection.setblocking(False)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._read = b""
        self.is_open = True

    def send(self, value: object) -> None:
        """Send one object; an end that does not read for long counts as gone."""
        data = json.dumps(value).encode() + b"\n"
        if not self.is_open:
            return
        try:
            if self.socket.send(data) < len(data):
                self.close()
        except OSError:
            self.close()

    def receive(self) -> list[object]:
        """Return the objects that have arrived; close if the other end is gone or sends no JSON."""
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
    """Connect to a host; return None if it does not answer within seconds."""
    with suppress(OSError):
        return Line(socket.create_connection((host, port), timeout=3.0))
    return None


def listen() -> socket.socket:
    """Open a socket that accepts connections on a free port, over IPv4 and, if possible, IPv6."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True
            )
    return socket.create_server(("", 0), backlog=4096)


class Listener:
    """The arbiter's connections: receives the lines of the sentries and answers them.

    `selector` belongs to the caller, who calls the function registered with each file that is
    ready.
    """

    def __init__(
        self,
        listener: socket.socket,
        arbiter: Arbiter,
        *,
        world_size: int,
        token: str,
        selector: selectors.BaseSelector,
    ) -> None:
        self._listener = listener
        self._arbiter = arbiter
        self._token = token
        self._selector = selector
        self._awaited = set(range(world_size))
        self._lines: dict[Line, int | None] = {}
        self._finding = Finding()
        self._next = self._beat = 0.0
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    @property
    def is_empty(self) -> bool:
        """True once every sentry has come and gone."""
        return not self._awaited and self.is_alone

    @property
    def is_alone(self) -> bool:
        """True if no sentry is there now; some may never have come."""
        return all(rank is None for rank in self._lines.values())

    def watch_store(self, host: str, port: int) -> None:
        """Report to the arbiter when the process group's store at an address goes away.

        An open connection is enough: the system closes it when the process at the other end dies.
        """
        line = connect(host, port)
        if line is None:
            return
        line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 5)):
            if hasattr(socket, name):
                line.socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

        def look() -> None:
            line.receive()
            if not line.is_open:
                self._selector.unregister(line.descriptor)
                self._arbiter.lose_store()

        self._selector.register(line.descriptor, selectors.EVENT_READ, look)

    def serve(self, now: float) -> None:
        """Send the sentries a sign of life, and the outcome once there is one.

        Asking the arbiter takes time for each rank, so it is not asked at each message.
        """
        if now >= self._beat:
            self._beat = now + BEAT
            first = self._arbiter.ranks.get(0)
            doing = first.report.doing if first else ""
            self._send_all({"doing": doing}, self._arbiter.speakers(blamed=0))
        if self._finding.text or not (self._arbiter.news or now >= self._next):
            return
        self._next = now + _LOOK
        self._finding = self._arbiter.check(now)
        if self._finding.text:
            self._send_all({}, self._arbiter.speakers(self._finding.blamed))

    def _send_all(self, fields: dict[str, object], speakers: set[int]) -> None:
        for line, rank in list(self._lines.items()):
            if rank is not None:
                line.send(fields | self._message(rank, rank in speakers))
                self._forget_closed(line)

    def _message(self, rank: int, speaks: bool) -> dict[str, object]:
        """Return the message to a rank's sentry; its "outcome" is empty while the run goes on."""
        text, blamed, code = self._finding
        return {
            "token": self._token,
            "outcome": text,
            "speaks": speaks,
            "blamed": rank == blamed,
            "code": code,
        }

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the caller has gone, or too many files are open
            return
        line = Line(connection)
        self._lines[line] = None
        self._selector.register(line.descriptor, selectors.EVENT_READ, lambda: self._receive(line))

    def _receive(self, line: Line) -> None:
        for message in line.receive():
            self._take_report(line, message)
        self._forget_closed(line)

    def _take_report(self, line: Line, message: Any) -> None:
        token = message.get("token") if isinstance(message, dict) else None
        if not isinstance(token, str) or not hmac.compare_digest(token, self._token):
            line.close()  # not a sentry of this run
            return
        rank = message["rank"]
        report = Report(*message["report"])
        self._arbiter.hear(rank, report)
        if self._lines[line] is None:  # it waits for an answer to its first message
            line.send(self._message(rank, rank in self._arbiter.speakers(blamed=0)))
        self._awaited.discard(rank)
        self._lines[line] = rank
        if report.state == GONE:
            line.close()

    def _forget_closed(self, line: Line) -> None:
        if line.is_open or line not in self._lines:
            return
        self._selector.unregister(line.descriptor)
        rank = self._lines.pop(line)
        if rank is not None:
            self._arbiter.lose(rank)
