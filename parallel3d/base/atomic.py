"""Replaces files whole or not at all, whoever is killed and whenever the power goes (floor 0).

Each step has a fault point, under the name that its caller gives, at which a test ends the process.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from parallel3d.base.fault import fault_point


@contextmanager
def replaced(path: Path, *, shared: bool = False, points: str = "atomic") -> Iterator[Path]:
    """Yield a path to write a file to, which replaces `path` whole, on disk, as the block ends.

    On any error it vanishes and the old file stays. `shared`: other processes may be at the same.
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
    """Write a text file in place of the old one, as `replaced` does."""
    with replaced(path, shared=shared) as partial:
        partial.write_text(text, encoding="utf-8")


def rename(old: Path, new: Path, points: str = "atomic") -> None:
    """Give a file or folder its name, in one instant, on disk when this returns."""
    fault_point(f"{points}.before_rename")
    os.rename(old, new)
    fault_point(f"{points}.after_rename")
    sync_folder(new.parent, points)


def sync_folder(path: Path, points: str = "atomic") -> None:
    """Write the names in a folder through to the disk."""
    fault_point(f"{points}.before_folder_fsync")
    sync(path)
    fault_point(f"{points}.after_folder_fsync")


def sync(path: Path) -> None:
    """Write the contents of a file, or the names in a folder, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
