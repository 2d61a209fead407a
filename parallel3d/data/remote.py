"""The shards of streams in any file system, by paths or URLs such as s3://bucket/file.

They are read through fsspec, a dependency of `datasets`. The file system of a protocol is a
separate package (s3fs, gcsfs), which also handles credentials.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

from parallel3d.base.errors import DataError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

SILENT_SECONDS = 20.0
"""A server that sends nothing for so long is not waited for any longer."""

_NOT_FOUND = 404

Answer = TypeVar("Answer")


def is_url(path: str) -> bool:
    """True if `path` has a protocol."""
    return "://" in path


def is_file(path: str) -> bool:
    """True if a file with this path or URL exists."""
    if not is_url(path):
        return os.path.isfile(path)
    return ask(path, lambda system, inner: bool(system.isfile(inner)))


def matching_urls(pattern: str) -> list[str]:
    """Return the sorted URLs of the files that match a URL or glob; raise DataError if none do."""

    def find(system: "AbstractFileSystem", path: str) -> list[str]:
        paths = [path] if system.isfile(path) else system.glob(path)
        if not paths:
            _raise_other_cause(system, path)
        return sorted(str(system.unstrip_protocol(p)) for p in paths if system.isfile(p))

    urls = ask(pattern, find)
    if not urls:
        raise DataError(
            f"data.paths: {pattern!r} matches no file; use the URL of a file, or a glob"
        )
    return urls


def _raise_other_cause(system: "AbstractFileSystem", path: str) -> None:
    """Raise the error because of which a file was not found, if the server answered with one."""
    try:
        system.info(path)
    except FileNotFoundError as error:
        # To fsspec every answer of a web server but a file is a file that was not found.
        cause = error.__cause__
        if cause is not None and getattr(cause, "status", _NOT_FOUND) != _NOT_FOUND:
            raise cause from None


def ask(
    url: str,
    question: Callable[["AbstractFileSystem", str], Answer],
    received_bytes: Callable[[], int] = lambda: 0,
) -> Answer:
    """Return the answer of the file system of a URL, which gets the system and the path in it.

    Raises DataError, also if the server is silent for SILENT_SECONDS.

    - `received_bytes`: returns how much has arrived; while this grows, the server is not silent.
    """
    with system_of(url) as (system, path):
        if not is_url(url):
            return question(system, path)
        answers: list[Answer] = []
        errors: list[BaseException] = []

        def answer() -> None:
            try:
                answers.append(question(system, path))
            except BaseException as error:  # raised again in the thread that asks
                errors.append(error)

        # Few file systems have a time limit, and each has its own setting for it.
        thread = Thread(target=answer, name="file system", daemon=True)
        thread.start()
        received = received_bytes()
        deadline = time.monotonic() + SILENT_SECONDS
        while thread.is_alive():
            thread.join(0.05)
            if received != (received := received_bytes()):
                deadline = time.monotonic() + SILENT_SECONDS
            elif time.monotonic() > deadline:
                raise TimeoutError(f"the server sent nothing for {SILENT_SECONDS:.0f} s")
        if errors:
            raise errors[0]
        return answers[0]


@contextmanager
def system_of(url: str) -> Iterator[tuple["AbstractFileSystem", str]]:
    """Yield the file system of a URL or path, and the path in it; turn errors into DataErrors."""
    try:
        # The import takes half a second; a run whose data are not streamed does not need it.
        from fsspec.core import url_to_fs

        yield url_to_fs(url)
    except ImportError as error:
        raise DataError(
            f"{url} cannot be read: {error}; run `pip install parallel3d[remote]`, or install"
            " fsspec's package for this protocol"
        ) from error
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise DataError(
            f"{url} cannot be read ({reason}); check its name, your credentials and the network"
        ) from error
