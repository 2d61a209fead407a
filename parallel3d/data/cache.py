"""Directories that appear whole or not at all, whoever is killed and whoever else is writing.

Beside a directory DIR, `DIR.lock` is held (flock: the kernel lets go when a process dies) while
`DIR.partial` is filled; a rename makes it DIR. After a crash both stay; the next writer of any
directory in the same place removes them, because it finds the lock free.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MANIFEST = "files.json"


def cache_root(cache: str) -> Path:
    """Give the cache's directory: "auto" is parallel3d under $XDG_CACHE_HOME or ~/.cache."""
    if cache == "auto":
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "parallel3d"
    return Path(cache).expanduser().absolute()


@contextmanager
def locked(directory: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Keep every other process from writing `directory`; call `on_wait` if one is at it now.

    The lock file is gone afterwards. Raises OSError where it cannot be written.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    path = _lock_path(directory)
    file = _try_lock(path)
    if file is None:
        on_wait()
    while file is None:
        file = _try_lock(path, wait=True)
    try:
        yield
    finally:
        _unlock(path, file)


@contextmanager
def staged(directory: Path) -> Iterator[Path]:
    """Give an empty folder that becomes `directory` when the block ends, or vanishes on any error.

    What `directory` held before is replaced. To be called with the directory locked.
    """
    remove_leftovers(directory.parent)
    partial = _partial_path(directory)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        _write_manifest(partial)
        _flush(partial)
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
        _flush_one(directory.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def is_whole(directory: Path) -> bool:
    """Say whether `directory` holds each file that it was published with, at its full size."""
    try:
        sizes = json.loads((directory / MANIFEST).read_text())
        return bool(sizes) and all(
            (directory / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, ValueError, AttributeError):
        return False


def remove_leftovers(parent: Path) -> None:
    """Remove what killed processes left in `parent`; those at work hold their locks."""
    for path in sorted(parent.glob("*.lock")):
        file = _try_lock(path)
        if file is not None:
            shutil.rmtree(path.with_suffix(".partial"), ignore_errors=True)
            _unlock(path, file)


def _lock_path(directory: Path) -> Path:
    return directory.with_name(directory.name + ".lock")


def _partial_path(directory: Path) -> Path:
    return directory.with_name(directory.name + ".partial")


def _try_lock(path: Path, wait: bool = False) -> int | None:
    """Give the descriptor that holds the lock, or None if another does (or just removed it)."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        # The last holder removes the file: a lock on a removed file keeps nobody out.
        if os.path.samestat(os.fstat(file), os.stat(path)):
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return None


def _unlock(path: Path, file: int) -> None:
    path.unlink(missing_ok=True)
    os.close(file)


def _write_manifest(directory: Path) -> None:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    sizes = {str(path.relative_to(directory)): path.stat().st_size for path in files}
    (directory / MANIFEST).write_text(json.dumps(sizes, indent=1))


def _flush(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        _flush_one(path)


def _flush_one(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
