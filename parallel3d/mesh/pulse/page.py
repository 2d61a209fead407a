"""The page of memory that a rank and its sentry share (floor 0, no torch).

No locks and no system calls: each field has one writer, and a reader that sees half of a text being
written reads it again soon. What is read once, a verdict and the end, is one byte that is written
last: `struct` clears all of its bytes before it writes the first.
"""

import mmap
import os
import struct
import tempfile
import time
from typing import NamedTuple

SIZE = mmap.PAGESIZE
_DOING = struct.Struct("=d?255p")  # since, waits, text
_LIMIT, _LEFT, _WATCHED, _REASON, _VERDICT = 512, 520, 521, 528, 1024  # where the others begin
_RUNS = -1
_TEXT = struct.Struct("=?H")  # of a verdict: this rank says it, its length
_AFTER = _VERDICT + 1  # the byte that says that there is one


class Doing(NamedTuple):
    """What a rank does now, since when, and whether it waits for another."""

    text: str
    since: float
    """`time.monotonic` of its machine."""
    waits: bool
    """For another rank."""


class Verdict(NamedTuple):
    """Why the run is over."""

    text: str
    speaks: bool
    """Whether this rank is the one of its machine that says it."""


class Page:
    """One rank's page, by the file `descriptor` that both processes have open."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, SIZE)

    # What the rank writes.

    def do(self, text: str, waits: bool = False) -> None:
        """Say what the rank does from now on; at most 255 bytes are kept."""
        _DOING.pack_into(self._map, 0, time.monotonic(), waits, text.encode())

    def set_limit(self, seconds: float) -> None:
        """Say how long the rank may wait for another; 0: for ever."""
        struct.pack_into("=d", self._map, _LIMIT, seconds)

    def leave(self, code: int | None, reason: str = "") -> None:
        """Say that the rank ends, with which exit code (None: it runs), and why it fails alone."""
        struct.pack_into("=255p", self._map, _REASON, reason.encode())
        self._map[_LEFT] = (_RUNS if code is None else code) & 0xFF

    @property
    def doing(self) -> Doing:
        """What the rank does, or did when it died."""
        since, waits, text = _DOING.unpack_from(self._map, 0)
        return Doing(text.decode(errors="replace"), since, waits)

    @property
    def limit(self) -> float:
        """Seconds that the rank may wait for another; 0: for ever."""
        [seconds] = struct.unpack_from("=d", self._map, _LIMIT)
        return float(seconds)

    @property
    def left(self) -> int | None:
        """The exit code of a rank that ends by itself; None while it runs."""
        [code] = struct.unpack_from("=b", self._map, _LEFT)
        return None if code == _RUNS else int(code)

    @property
    def reason(self) -> str:
        """Why the rank fails, where no other does."""
        [text] = struct.unpack_from("=255p", self._map, _REASON)
        return str(text.decode(errors="replace"))

    # What the sentry writes.

    def judge(self, verdict: Verdict) -> None:
        """Tell the rank that the run is over."""
        begin = _AFTER + _TEXT.size
        text = verdict.text.encode()[: SIZE - begin]
        self._map[begin : begin + len(text)] = text
        _TEXT.pack_into(self._map, _AFTER, verdict.speaks, len(text))
        self._map[_VERDICT] = True

    @property
    def is_watched(self) -> bool:
        """Whether the judge has heard of the rank."""
        return bool(self._map[_WATCHED])

    @is_watched.setter
    def is_watched(self, value: bool) -> None:
        self._map[_WATCHED] = value

    @property
    def verdict(self) -> Verdict | None:
        """Why the run is over, if it is."""
        if not self._map[_VERDICT]:
            return None
        speaks, length = _TEXT.unpack_from(self._map, _AFTER)
        begin = _AFTER + _TEXT.size
        return Verdict(self._map[begin : begin + length].decode(errors="replace"), speaks)


def new_page() -> tuple[Page, int]:
    """An empty page, and the descriptor by which another process opens it, too."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("parallel3d-pulse")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, SIZE)
    page = Page(descriptor)
    page.leave(None)
    return page, descriptor
