"""Folders that appear whole or not at all, whoever is killed and whoever else is writing.

Beside a directory DIR, the lock `DIR.lock` is held while `DIR.partial` is filled; a rename makes it
DIR. After a crash both stay; the next writer of any directory in the same place removes them,
because it finds the lock's holder dead.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

from parallel3d.base.atomic import rename, sync
from parallel3d.base.lock import Lock

MANIFEST = "files.json"


def cache_root(cache: str) -> Path:
    """The cache's directory: "auto" is parallel3d under $XDG_CACHE_HOME or ~/.cache."""
    if cache == "auto":
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "parallel3d"
    return Path(cache).expanduser().absolute()


@contextmanager
def locked(directory: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Keep every other process from writing `directory`; call `on_wait` if one is at it now.

    The lock file is gone afterwards. Raises OSError where it cannot be written.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    lock = Lock(directory.with_name(f"{directory.name}.lock"))
    lock.wait(on_wait)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def staged(directory: Path) -> Iterator[Path]:
    """An empty folder that becomes `directory` when the block ends, or vanishes on any error.

    It replaces an older `directory`. To be called with the directory locked.
    """
    remove_leftovers(directory.parent)
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        _write_manifest(partial)
        for path in [*partial.rglob("*"), partial]:
            sync(path)
        shutil.rmtree(directory, ignore_errors=True)
        rename(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def is_whole(directory: Path, bits: bool = False) -> bool:
    """Whether `directory` holds each file that it was published with, at its full size.

    With `bits`, each file's contents are compared with their digest too, at the disk's speed.
    """
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


def _write_manifest(directory: Path) -> None:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    entries = {str(p.relative_to(directory)): [p.stat().st_size, _digest(p)] for p in files}
    (directory / MANIFEST).write_text(json.dumps(entries, indent=1))


def _digest(path: Path) -> str:
    digest = blake2b(digest_size=16)
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
