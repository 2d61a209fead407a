"""Objects as lines of JSON over TCP, between processes that know one secret (floor 0)."""

import json
import socket
from contextlib import suppress
from typing import Any

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
