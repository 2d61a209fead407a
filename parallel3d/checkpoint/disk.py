"""Writes that survive a kill and a power cut: every write, sync, rename and delete of a save.

Each of them has a fault point, at which the kill drill ends the process.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from parallel3d.base import atomic
from parallel3d.base.fault import fault_point
from parallel3d.checkpoint.manifest import Entry

_POINTS = "checkpoint"  # how the names of the fault points begin
rename = partial(atomic.rename, points=_POINTS)
sync_folder = partial(atomic.sync_folder, points=_POINTS)
BLOCK = 8 * 2**20  # bytes of one write, between which the process may be killed


def write_file(
    path: Path, parts: Iterable[Any], hashed: bool = True, *, synced: bool = True
) -> Entry:
    """Write a new file of these parts, on disk on return; gives its size and digest.

    Nothing is copied: host arrays are written from where they lie. `synced`: False leaves it to
    the caller to have the file on disk. Raises OSError.
    """
    digest, size, begun = xxh3_128(), 0, 0
    fault_point("checkpoint.before_create")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        fault_point("checkpoint.after_create")
        for part in parts:
            data = memoryview(part).cast("B")
            for start in range(0, len(data), BLOCK):
                block = data[start : start + BLOCK]
                fault_point("checkpoint.before_write")
                _write_all(descriptor, block)
                if hashed:
                    digest.update(block)
                size += len(block)
                if size - begun >= BLOCK and hasattr(os, "posix_fadvise"):  # not on macOS
                    # The disk begins with it now, and the sync waits for the rest alone.
                    os.posix_fadvise(descriptor, begun, size - begun, os.POSIX_FADV_DONTNEED)
                    begun = size
        if synced:
            fault_point("checkpoint.before_fsync")
            os.fsync(descriptor)
            fault_point("checkpoint.after_fsync")
    finally:
        os.close(descriptor)
    return Entry(size, digest.hexdigest())


def _write_all(descriptor: int, block: memoryview) -> None:
    while block:
        block = block[os.write(descriptor, block) :]


def make_folder(path: Path) -> None:
    """Make a new empty folder and all above it; an old one of that name is removed first."""
    fault_point("checkpoint.before_mkdir")
    if not path.parent.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        sync_folder(path.parent.parent)
    remove_folder(path)
    path.mkdir()
    sync_folder(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder of files, if it is there."""
    if not path.is_dir():
        return
    for file in sorted(path.iterdir()):
        if file.is_dir() and not file.is_symlink():
            remove_folder(file)
            continue
        fault_point("checkpoint.before_delete")
        with suppress(FileNotFoundError):
            file.unlink()
    fault_point("checkpoint.before_rmdir")
    with suppress(FileNotFoundError):
        path.rmdir()
    fault_point("checkpoint.after_rmdir")


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, in such an order that a part of it is never taken for one."""
    gone = path.with_name(f"{path.name}.deleted")
    remove_folder(gone)
    rename(path, gone)
    remove_folder(gone)


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed save left behind; nothing else may be saving there."""
    for pattern in ("step-*.tmp", "step-*.deleted"):
        for path in folder.glob(pattern):
            with suppress(OSError):
                remove_folder(path)


def copy_folder(source: Path, target: Path) -> None:
    """Copy a small folder, on disk on return; an old one at the target is removed first.

    Raises OSError.
    """
    remove_folder(target)
    fault_point("checkpoint.before_folder")
    target.mkdir()
    for path in sorted(source.iterdir()):
        if path.is_dir():
            copy_folder(path, target / path.name)
        else:
            write_file(target / path.name, [path.read_bytes()])
    sync_folder(target)


def replace_text(path: Path, text: str) -> None:
    """Write a small file in place of the old one, whole or not at all."""
    with atomic.replaced(path, points=_POINTS) as new:
        write_file(new, [text.encode()], synced=False)
