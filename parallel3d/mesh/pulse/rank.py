"""A rank's side of the watch: record what it does, learn why the run is over (floor 0, no torch).

Without a sentry (one rank, a test, another command) each call costs one comparison.
"""

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from parallel3d.mesh.pulse.arbiter import Limits
from parallel3d.mesh.pulse.listener import listen
from parallel3d.mesh.pulse.page import Outcome, Page, new_page
from parallel3d.mesh.pulse.sentry import SentryTask

LIMITS = Limits()
SOON = 10.0  # seconds for the outcome to arrive once a collective has failed
_ROOT = str(Path(__file__).parents[3])
# Isolated and without site-packages, which halves its start-up time.
_SENTRY = (
    f"import sys; sys.path.insert(0, {_ROOT!r}); "
    "from parallel3d.mesh.pulse.sentry import main; main()"
)

_page: Page | None = None
_text = ""


class Marks(Protocol):
    """Events at the ends of actions on a device that runs beside its host."""

    def end(self, text: str, computes: bool) -> None:
        """Mark the end of an action; `computes`: the device waits for no other stage in it."""

    def standing(self) -> tuple[str, bool] | None:
        """Return the device's action, and if it computes; None if it has ended all."""


_marks: Marks | None = None
_action = ("", False)  # the action of the host, and if it computes
_seen = ("", False)  # the same for the device, as last recorded


def begin(
    rank: int,
    world_size: int,
    store: tuple[str, int],
    names: list[str],
    publish: Callable[[str], None],
    fetch: Callable[[], str],
) -> None:
    """Start this rank's sentry; rank 0's sentry contains the arbiter.

    - `store`: host and port of the process group's store.
    - `names`: rank 0's host names, the one to be shown last.
    - `publish`, `fetch`: rank 0 publishes the arbiter's address, the other ranks fetch it.
    """
    global _page
    page, descriptor = new_page()
    page.do(_text or "its start")
    passed = [descriptor]
    if rank == 0:
        listener = listen()
        passed.append(listener.fileno())
        token = secrets.token_hex(16)
        port = listener.getsockname()[1]
        publish(json.dumps([token, names, port]))
    else:
        token, names, port = json.loads(fetch())
    task = SentryTask(
        rank=rank,
        world_size=world_size,
        parent=os.getpid(),
        page=descriptor,
        token=token,
        limits=list(LIMITS),
        hosts=names,
        port=port,
        listener=listener.fileno() if rank == 0 else -1,
        store=store,
    )
    # In the session of the job, so that Ctrl-Z stops its sentries as well.
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _SENTRY],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=passed,
    )
    assert process.stdin
    process.stdin.write(json.dumps(task).encode())
    process.stdin.close()
    process.returncode = 0  # not waited for: it outlives this process
    os.close(descriptor)
    if rank == 0:
        listener.close()
    _page = page


def follow(marks: Marks) -> None:
    """Mark the ends of this rank's actions on its device from now on."""
    global _marks
    _marks = marks


def look_at_device() -> None:
    """Record where the device stands, for the arbiter; any thread."""
    global _seen
    if _page is None or _marks is None:
        return
    # Where the host waits for its device, that one is in the host's action.
    now = _marks.standing() or (_action if _page.doing[2] else ("", False))
    if now != _seen:
        _seen = now
        _page.stand(*now)


def _do(text: str, waits: bool = False) -> None:
    global _action
    if _marks is not None:
        _marks.end(*_action)
    _action = text, False
    if _page is not None:
        _page.do(text, waits)


def doing(text: str) -> None:
    """Record what this rank does from now on; main thread only."""
    global _text
    _text = text
    _do(text)


def computing() -> None:
    """Record that the rank's device waits for no other pipeline stage in what it does."""
    global _action
    _action = _action[0], True


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Mark this rank as waiting for others inside the context: "1F0 of step 3, `what`"."""
    if _page is None:
        yield
        return
    _do(f"{_text}, {what}", waits=True)
    yield
    _do(_text)  # not after an error: the page still shows the wait


def outcome_after_failed_collective() -> Outcome | None:
    """Return why the run is over, or None if the arbiter does not find it in time.

    The collective may be one of DeepSpeed's, which is not marked as a wait.
    """
    if _page is not None:
        _page.has_waited()
    return outcome(SOON)


def is_watched() -> bool:
    """True if this rank has a sentry that has reached the arbiter."""
    return _page is not None and _page.is_watched


def set_limit(seconds: float) -> None:
    """Set how many seconds a rank may wait for another from now on; 0 means no limit."""
    if _page is not None:
        _page.limit = seconds


def leave(code: int, reason: str = "") -> None:
    """Record that this rank ends, its exit code, and the reason if no other rank knows it."""
    if _page is not None and _page.left is None:
        _page.leave(code, reason)


def outcome(seconds: float = 0.0) -> Outcome | None:
    """Return why the run is over, waiting up to `seconds` for it; else None."""
    deadline = time.monotonic() + seconds
    while True:
        outcome = _page.outcome if _page is not None else None
        if outcome or _page is None or time.monotonic() >= deadline:
            return outcome
        time.sleep(0.05)
