"""The page of memory that a rank and its sentry share (floor 0, no torch).

There are no locks and no system calls: each field has one writer, and a torn text is soon read
again. The byte that says that an outcome or an exit code is present is written last.
"""

import ctypes
import mmap
import os
import tempfile
import time
from typing import ClassVar, NamedTuple

_RUNS = -1  # in place of an exit code


class Outcome(NamedTuple):
    """Why the run is over."""

    text: str
    speaks: bool
    """True on the one rank of each machine that prints the text."""
    code: int
    """The exit code of the run: 1, or 3 after a request to stop."""


class Page(ctypes.Structure):
    """One rank's page; texts that do not fit are cut."""

    limit: float
    """Seconds that the rank may wait for another; 0 means no limit."""
    is_watched: bool
    """True once the arbiter has answered the sentry."""

    _fields_: ClassVar = [
        ("_since", ctypes.c_double),
        ("_waits", ctypes.c_bool),
        ("_device", ctypes.c_char * 256),
        ("_device_since", ctypes.c_double),
        ("_computes", ctypes.c_bool),
        ("_doing", ctypes.c_char * 256),
        ("limit", ctypes.c_double),
        ("_reason", ctypes.c_char * 256),
        ("_left", ctypes.c_byte),
        ("is_watched", ctypes.c_bool),
        ("_outcome", ctypes.c_char * 2048),
        ("_speaks", ctypes.c_bool),
        ("_code", ctypes.c_byte),
        ("_is_over", ctypes.c_bool),
    ]

    def do(self, text: str, waits: bool = False) -> None:
        """Record what the rank does from now on."""
        self._since = time.monotonic()
        self._waits = waits
        self._doing = text.encode()[:255]

    def has_waited(self) -> None:
        """Record that the rank has waited for others since its action began."""
        self._waits = True

    @property
    def doing(self) -> tuple[str, float, bool]:
        """The rank's action, its start (`time.monotonic`), and whether it waits for another."""
        return (self._doing.decode(errors="replace"), self._since, self._waits)

    def stand(self, text: str, computes: bool) -> None:
        """Record the action in which the rank's device is from now on; "" if it has ended all."""
        self._device_since = time.monotonic()
        self._computes = computes
        self._device = text.encode()[:255]

    @property
    def device(self) -> tuple[str, float, bool]:
        """The device's action, when it was first seen there, and whether it computes."""
        return (self._device.decode(errors="replace"), self._device_since, self._computes)

    def leave(self, code: int, reason: str = "") -> None:
        """Record that the rank ends, its exit code, and the reason if no other rank knows it."""
        self._reason = reason.encode()[:255]
        self._left = code

    @property
    def left(self) -> int | None:
        """The exit code of a rank that ends by itself; None while it runs."""
        return None if self._left == _RUNS else int(self._left)

    @property
    def reason(self) -> str:
        """Why the rank ends, if no other rank does."""
        return str(self._reason.decode(errors="replace"))

    def end(self, outcome: Outcome) -> None:
        """Tell the rank that the run is over."""
        self._outcome = outcome.text.encode()[:2047]
        self._speaks = outcome.speaks
        self._code = outcome.code
        self._is_over = True

    @property
    def outcome(self) -> Outcome | None:
        """Why the run is over; None while it goes on."""
        if not self._is_over:
            return None
        return Outcome(self._outcome.decode(errors="replace"), self._speaks, self._code)


def open_page(descriptor: int) -> Page:
    """Return the page in a file that two processes have open."""
    return Page.from_buffer(mmap.mmap(descriptor, ctypes.sizeof(Page)))


def new_page() -> tuple[Page, int]:
    """Return an empty page, and a descriptor with which another process can open it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("parallel3d-pulse")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, ctypes.sizeof(Page))
    page = open_page(descriptor)
    page._left = _RUNS
    return page, descriptor
