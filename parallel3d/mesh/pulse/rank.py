"""A rank's side of the pulse: say what it does, hear the verdict (floor 0, no torch).

Without a sentry (one rank, a test, another command) all of this is a comparison.
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

from parallel3d.mesh.pulse.court import listen
from parallel3d.mesh.pulse.judge import Limits
from parallel3d.mesh.pulse.page import Page, Verdict, new_page
from parallel3d.mesh.pulse.sentry import SentryTask

LIMITS = Limits()
SOON = 5.0  # seconds in which the verdict comes on what a collective has noticed already
_ROOT = str(Path(__file__).parents[3])
# Isolated and without site-packages: it starts in the time that they would take to be found.
_SENTRY = (
    f"import sys; sys.path.insert(0, {_ROOT!r}); "
    "from parallel3d.mesh.pulse.sentry import main; main()"
)

_page: Page | None = None
_text = ""


def begin(
    rank: int,
    world_size: int,
    store: tuple[str, int],
    names: list[str],
    publish: Callable[[str], None],
    fetch: Callable[[], str],
) -> None:
    """Start this rank's sentry; on rank 0, the judge is in it.

    `store` is the host and port of the process group's store. Rank 0 gives the judge's address and
    the `names` of its host, the last to be shown, through `publish`; the others have it from
    `fetch`.
    """
    global _page
    page, descriptor = new_page()
    page.do(_text or "its start")
    passed = [descriptor]
    if rank == 0:
        listener = listen()
        passed.append(listener.fileno())
        token, port = secrets.token_hex(16), listener.getsockname()[1]
        publish(json.dumps([token, names, port]))
    else:
        token, names, port = json.loads(fetch())
    task = SentryTask(
        rank, world_size, os.getpid(), descriptor, token, list(LIMITS), names, port,
        passed[1] if rank == 0 else -1, store,
    )  # fmt: skip
    # Not in a session of its own: what stops the whole job (Ctrl-Z) shall stop its sentries, too.
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _SENTRY],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=passed,
    )  # fmt: skip
    assert process.stdin
    process.stdin.write(json.dumps(task).encode())
    process.stdin.close()
    process.returncode = 0  # nobody waits for it: it outlives this process
    os.close(descriptor)
    if rank == 0:
        listener.close()
    _page = page


def doing(text: str, waits: bool = False) -> None:
    """Say what this rank does from now on, and whether it waits for another; main thread only."""
    global _text
    _text = text
    if _page is not None:
        _page.do(text, waits)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Have this rank marked as waiting for others inside the context: "1F0 of step 3, `what`"."""
    if _page is None:
        yield
        return
    _page.do(f"{_text}, {what}", waits=True)
    try:
        yield
    finally:
        # The page keeps a wait that failed.
        if sys.exc_info()[0] is None:
            _page.do(_text)


def is_watched() -> bool:
    """Whether this rank has a sentry, and the judge has heard of it."""
    return _page is not None and _page.is_watched


def set_limit(seconds: float) -> None:
    """Set how many seconds a rank may wait for another from now on; 0: for ever."""
    if _page is not None:
        _page.limit = seconds


def leave(code: int, reason: str = "") -> None:
    """Say that this rank ends by itself, with which code, and why if no other rank knows it."""
    if _page is not None and _page.left is None:
        _page.leave(code, reason)


def verdict(seconds: float = 0.0) -> Verdict | None:
    """Why the run is over, if a verdict comes within the given seconds."""
    deadline = time.monotonic() + seconds
    while True:
        found = _page.verdict if _page is not None else None
        if found or _page is None or time.monotonic() >= deadline:
            return found
        time.sleep(0.05)
