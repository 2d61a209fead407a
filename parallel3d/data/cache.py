"""Folders that appear whole or not at all, whoever is killed and whoever else is writing.

Beside a directory DIR, the lock `DIR.lock` is held while `DIR.partial` is filled; a rename makes it
DIR. After a crash both stay; the next writer of any directory in the same place removes them,
because it finds the lock's holder dead.

An index is what was found in a source's file. It is kept for as long as the file is untouched.
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
from parallel3d.base.lock import Lock

MANIFEST = "files.json"
# A file that changed so lately may change again within its clock's tick, unseen.
SECONDS_UNTIL_SETTLED = 2.0
DAYS_KEPT = 30


def cache_root(cache: str) -> Path:
    """The cache's directory: "auto" is parallel3d under $XDG_CACHE_HOME or ~/.cache."""
    if cache == "auto":
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "parallel3d"
    return Path(cache).expanduser().absolute()


@contextmanager
def locked(directory: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Keep every other process from writing `directory`; call `on_wait` if one is at it now."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    lock = Lock(directory.with_name(f"{directory.name}.lock"))
    lock.wait(on_wait)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def staged(directory: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `directory`, which the caller has locked, or vanishes."""
    remove_leftovers(directory.parent)
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        entries = {str(p.relative_to(partial)): [p.stat().st_size, _digest(p)] for p in files}
        (partial / MANIFEST).write_text(json.dumps(entries, indent=1))
        for path in [*partial.rglob("*"), partial]:
            sync(path)
        shutil.rmtree(directory, ignore_errors=True)
        rename(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def is_whole(directory: Path, bits: bool = False) -> bool:
    """True if `directory` holds its manifest's files, of their sizes and, with `bits`, digests."""
    try:
        published = json.loads((directory / MANIFEST).read_text())
        return bool(published) and all(
            (directory / name).stat().st_size == size
            and (not bits or _digest(directory / name) == digest)
            for name, (size, digest) in published.items()
        )
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def prune(parent: Path, days: int) -> None:
    """Remove entries of `parent` that were not touched for `days` days."""
    for path in parent.iterdir():
        # Another process may be at the same.
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > days * 86400:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def remove_leftovers(parent: Path) -> None:
    """Remove what killed processes left in `parent`; live processes hold their locks."""
    for path in sorted(parent.glob("*.lock")):
        lock = Lock(path)
        if lock.try_to_take() is None:
            shutil.rmtree(path.with_suffix(".partial"), ignore_errors=True)
            lock.release()


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: blake2b(digest_size=16)).hexdigest()


def digest_of(*parts: object) -> str:
    """Return a digest of the parts that can be a file's name."""
    return blake2b("\n".join(map(str, parts)).encode(), digest_size=16).hexdigest()


def load(index: Path) -> dict[str, Any] | None:
    """Return the findings that were kept as `index`; None if there are none, or damaged ones."""
    with suppress(OSError, ValueError, KeyError, BadZipFile), np.load(index) as kept:
        found = {name: kept[name][()] for name in kept.files}
        os.utime(index)
        return found
    return None


def keep(index: Path, found: dict[str, Any]) -> None:
    """Keep findings as `index`, unless the cache cannot be written: it only saves time."""
    with suppress(OSError):
        index.parent.mkdir(parents=True, exist_ok=True)
        with replaced(index, shared=True) as partial, open(partial, "wb") as file:
            np.savez(file, **found)
        prune(index.parent, DAYS_KEPT)


def state_of(path: str) -> tuple[int, ...]:
    """Return device, inode, size and times of a file; () where there is none."""
    with suppress(OSError):
        state = os.stat(path)
        return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns
    return ()


def is_settled(path: str) -> bool:
    """True if a file's last change was some time ago."""
    changed = state_of(path)[3:]
    return bool(changed) and time.time() - max(changed) / 1e9 > SECONDS_UNTIL_SETTLED
