"""Atomic replacement of files: a killed process or a power failure leaves the old or the new file.

Each step passes a fault point, named by the caller, at which a test can end the process (floor 0).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from parallel3d.base.fault import fault_point


@contextmanager
def replaced(path: Path, *, shared: bool = False, points: str = "atomic") -> Iterator[Path]:
    """Yield a path to write to; when the block ends, that file replaces `path` and is on disk.

    On any error the new file is removed and the old one stays. Set `shared` if other processes may
    replace the same file at the same time.
    """
    own = f".{os.getpid()}" if shared else ""
    partial = path.with_name(f"{path.name}{own}.partial")
    partial.unlink(missing_ok=True)
    try:
        yield partial
        fault_point(f"{points}.before_fsync")
        sync(partial)
        fault_point(f"{points}.after_fsync")
        rename(partial, path, points)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str, *, shared: bool = False) -> None:
    """Replace a text file atomically; see `replaced`."""
    with replaced(path, shared=shared) as partial:
        partial.write_text(text, encoding="utf-8")


def rename(old: Path, new: Path, points: str = "atomic") -> None:
    """Rename a file or folder atomically; the new name is on disk when this returns."""
    fault_point(f"{points}.before_rename")
    os.rename(old, new)
    fault_point(f"{points}.after_rename")
    sync_folder(new.parent, points)


def sync_folder(path: Path, points: str = "atomic") -> None:
    """Flush the names in a folder to disk."""
    fault_point(f"{points}.before_folder_fsync")
    sync(path)
    fault_point(f"{points}.after_folder_fsync")


def sync(path: Path) -> None:
    """Flush the contents of a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
