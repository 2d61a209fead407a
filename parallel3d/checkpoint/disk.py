"""Durable file operations of a save: writes, syncs, renames and deletes that survive power cuts.

Each of them has a fault point, at which the kill drill ends the process.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from parallel3d.base import atomic
from parallel3d.base.errors import TrainingError
from parallel3d.base.fault import fault_point
from parallel3d.checkpoint.manifest import MANIFEST, STATE, Entry, manifest_bytes

_POINTS = "checkpoint"  # prefix of the fault points' names
rename = partial(atomic.rename, points=_POINTS)
sync_folder = partial(atomic.sync_folder, points=_POINTS)
BLOCK = 8 * 2**20  # bytes per write; there is a fault point before each


def write_file(
    path: Path, parts: Iterable[Any], hashed: bool = True, *, synced: bool = True
) -> Entry:
    """Write a new file, synced to disk, and return its size and digest. Raises OSError.

    - `parts`: buffers (bytes, host arrays), which are written without a copy.
    - `hashed`: False skips the digest.
    - `synced`: False leaves the sync to the caller.
    """
    digest = xxh3_128()
    size = 0
    begun = 0
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
                    # Starts the write to disk now, so that the sync waits only for the rest.
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
    """Make an empty folder and its parents; removes an old folder of that name."""
    fault_point("checkpoint.before_mkdir")
    if not path.parent.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        sync_folder(path.parent.parent)
    remove_folder(path)
    path.mkdir()
    sync_folder(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder and what is in it, if it exists."""
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
    """Remove a checkpoint; it is renamed first, so that a rest is not mistaken for a checkpoint."""
    deleted = path.with_name(f"{path.name}.deleted")
    remove_folder(deleted)
    rename(path, deleted)
    remove_folder(deleted)


def publish(partial: Path, folder: Path, step: int, state: bytes, files: dict[str, Entry]) -> None:
    """Add state.json and the manifest to a complete `partial`, and rename it to `folder`.

    - `files`: the tensor files by name; state.json is added.
    """
    files[STATE] = write_file(partial / STATE, [state])
    write_file(partial / MANIFEST, [manifest_bytes(step, files)])
    sync_folder(partial)
    if folder.exists():
        # Left from before the run was resumed at an earlier step.
        remove_checkpoint(folder)
    rename(partial, folder)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed saves left in a run's folder. No save may be in progress there."""
    for pattern in ("step-*.tmp", "step-*.deleted"):
        for path in folder.glob(pattern):
            with suppress(OSError):
                remove_folder(path)


def copy_folder(source: Path, target: Path) -> dict[str, Entry]:
    """Copy a folder's small files, synced to disk, and return their sizes and hashes by path.

    Removes an old target. Raises OSError.
    """
    remove_folder(target)
    fault_point("checkpoint.before_folder")
    target.mkdir()
    entries = {}
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if path.is_dir():
            (target / name).mkdir()
        elif path.is_file():
            entries[name] = write_file(target / name, [path.read_bytes()])
    for folder in [*filter(Path.is_dir, target.rglob("*")), target]:
        sync_folder(folder)
    return entries


def replace_text(path: Path, text: str) -> None:
    """Replace a small file atomically."""
    with atomic.replaced(path, points=_POINTS) as new:
        write_file(new, [text.encode()], synced=False)


@contextmanager
def reporting(place: Path, prefix: str = "") -> Iterator[None]:
    """Turn any error into a TrainingError, which is reported to the waiting ranks."""
    try:
        yield
    except Exception as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        place = getattr(error, "filename", None) or place
        raise TrainingError(f"{prefix}{reason} ({place})") from None
