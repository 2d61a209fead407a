"""Folders that appear complete or not at all, despite crashes and concurrent writers.

To write a directory DIR, a process holds the lock `DIR.lock`, fills `DIR.partial`, and renames it
to DIR. After a crash, lock and partial folder stay behind; the next process that writes in the same
parent folder sees that the lock's holder is dead and removes both.

An index caches the result of scanning a source file. It is valid until the file changes.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from parallel3d.base.atomic import rename, replaced, sync
from parallel3d.base.errors import DataError
from parallel3d.base.journal import record
from parallel3d.base.lock import Lock
from parallel3d.base.paths import no_folder
from parallel3d.data.sources import Progress

MANIFEST = "files.json"
DAYS_KEPT = 30
MOST_BYTES = 2**63
# A larger corpus is only compared in size when it is opened.
_CHECKED_BYTES = 2 * 2**30


def cache_root(cache: str) -> Path:
    """Return the cache's directory; "auto" is parallel3d under $XDG_CACHE_HOME or ~/.cache.

    Raises DataError if it is a file, before a corpus is read for nothing.
    """
    root = Path(cache).absolute()
    if cache == "auto":
        root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "parallel3d"
    if reason := no_folder(root):
        raise DataError(
            f"the cache {root} cannot be written ({reason}); set data.cache to a writable directory"
        )
    return root


@contextmanager
def locked(directory: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Lock `directory` for writing; call `on_wait` before waiting for another process."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    lock = Lock(directory.with_name(f"{directory.name}.lock"))
    lock.wait(on_wait)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def staged(directory: Path, in_cache: bool = True) -> Iterator[Path]:
    """Yield an empty folder that replaces `directory` on success; the caller holds its lock.

    Leftovers beside it are removed if the parent folder belongs to the cache.
    """
    if in_cache:
        remove_leftovers(directory.parent)
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        seal(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def seal(partial: Path, directory: Path) -> None:
    """Add the manifest of a complete folder `partial`, and let it replace `directory`."""
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    entries = {str(p.relative_to(partial)): [p.stat().st_size, file_digest(p)] for p in files}
    (partial / MANIFEST).write_text(json.dumps(entries, indent=1))
    for path in [*partial.rglob("*"), partial]:
        sync(path)
    shutil.rmtree(directory, ignore_errors=True)
    rename(partial, directory)


@contextmanager
def published(directory: Path, progress: Progress) -> Iterator[Path | None]:
    """Yield a folder that becomes `directory`, or None if that is complete already.

    Raises DataError if the cache cannot be written.
    """

    def report_waiting() -> None:
        progress("waiting for another process to prepare this corpus", 0, 1)

    damaged = damaged_file(directory, _CHECKED_BYTES)
    if not damaged:
        yield None
        return
    if directory.is_dir():
        progress(f"{directory}/{damaged} is damaged; preparing it again", 0, 1)
        record("corpus_damaged", file=f"{directory}/{damaged}")
    try:
        with locked(directory, report_waiting):
            # The previous holder of the lock may have written it.
            if not damaged_file(directory, _CHECKED_BYTES):
                yield None
            else:
                with staged(directory) as folder:
                    yield folder
    except OSError as error:
        raise DataError(
            f"the cache {directory.parent} cannot be written ({error.strerror or error});"
            " set data.cache to a writable directory with enough space"
        ) from error


def is_complete(directory: Path, bits: bool = False) -> bool:
    """True if the files in `directory` have the manifest's sizes and, with `bits`, digests."""
    return not damaged_file(directory, MOST_BYTES if bits else 0)


def damaged_file(directory: Path, most_bytes: int) -> str:
    """Return the name of a file that is not as it was published, or ""; the manifest's if missing.

    Digests are compared unless all files together have more than `most_bytes`.
    """
    try:
        published = json.loads((directory / MANIFEST).read_text())
        bits = sum(size for size, _ in published.values()) <= most_bytes
        for name, (size, digest) in published.items():
            path = directory / name
            is_there = path.is_file() and path.stat().st_size == size
            if not is_there or (bits and file_digest(path) != digest):
                return str(name)
        return "" if published else MANIFEST
    except (OSError, ValueError, AttributeError, TypeError):
        return MANIFEST


def prune(parent: Path, days: int) -> None:
    """Remove entries of `parent` that were not modified for `days` days."""
    for path in parent.iterdir():
        # Another process may be removing the same entry.
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > days * 86400:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def remove_leftovers(parent: Path) -> None:
    """Remove partial folders of killed processes in `parent`; live processes hold their locks."""
    for path in sorted(parent.glob("*.lock")):
        lock = Lock(path)
        if lock.try_to_take() is None:
            shutil.rmtree(path.with_suffix(".partial"), ignore_errors=True)
            lock.release()


def file_digest(path: Path) -> str:
    """Return a digest of a file's contents."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: blake2b(digest_size=16)).hexdigest()


def digest_of(*parts: object) -> str:
    """Return a digest of `parts` that can be used as a file name."""
    return blake2b("\n".join(map(str, parts)).encode(), digest_size=16).hexdigest()


def load_index(index: Path) -> dict[str, Any] | None:
    """Return the arrays saved as `index`; None if it is missing or damaged."""
    with suppress(OSError, ValueError, KeyError, BadZipFile), np.load(index) as archive:
        arrays = {name: archive[name][()] for name in archive.files}
        os.utime(index)
        return arrays
    return None


def save_index(index: Path, arrays: dict[str, Any]) -> None:
    """Save `arrays` as `index`. An unwritable cache is ignored, since indexes only save time."""
    with suppress(OSError):
        index.parent.mkdir(parents=True, exist_ok=True)
        with replaced(index, shared=True) as partial, open(partial, "wb") as file:
            np.savez(file, **arrays)
        prune(index.parent, DAYS_KEPT)


def state_of(path: str) -> tuple[int, ...]:
    """Return device, inode, size and times of a file; () if it does not exist."""
    with suppress(OSError):
        state = os.stat(path)
        return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns
    return ()
