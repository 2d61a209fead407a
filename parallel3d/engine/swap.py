"""Folders of NVMe offload: one for each engine and rank, gone when the run is.

DeepSpeed names its swap files by rank and parameter, and never removes them: two engines or runs in
one folder would write over each other. So each engine has its own on each rank, which goes when the
engine is closed, at the process's end, or, where that was killed, with the next run.
"""

import atexit
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from parallel3d.base.errors import ConfigError
from parallel3d.mesh.agree import agree
from parallel3d.mesh.mesh import Mesh

_log = logging.getLogger(__name__)
_PREFIX = "parallel3d-"
_locks: dict[Path, int] = {}  # this process's folders, and the locks that say that it lives


def make_folder(nvme_path: str, mesh: Mesh, setting: str) -> Path:
    """Make a swap folder for this rank under `nvme_path`, without what killed runs left there.

    Collective: raises ConfigError, which names the setting, on all ranks if one cannot write there.
    """

    def make() -> Path:
        with _named(nvme_path, mesh, setting):
            _remove_leftovers(Path(nvme_path))
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=nvme_path))
            _locks[folder] = _lock(folder)
            return folder

    return agree(mesh, make)


def check_writable(nvme_path: str, mesh: Mesh, setting: str) -> None:
    """Raise ConfigError if this rank cannot write under `nvme_path`; no file stays there."""
    with _named(nvme_path, mesh, setting), tempfile.TemporaryFile(dir=nvme_path) as file:
        file.write(b"a byte")


@contextmanager
def _named(nvme_path: str, mesh: Mesh, setting: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f'{setting} = "{nvme_path}": cannot be written on rank {mesh.rank} '
            f"({error.strerror}); name a folder that exists and can be written on every node, "
            "on its NVMe drive"
        ) from None


def remove_folder(folder: Path) -> None:
    """Remove one of this process's swap folders, with all in it."""
    if folder in _locks:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(_locks.pop(folder))


@atexit.register
def remove_folders() -> None:
    """Remove all swap folders of this process."""
    for folder in list(_locks):
        remove_folder(folder)


def _lock(folder: Path) -> int:
    """Say that the folder is in use, until this process ends in whatever way."""
    new = folder / "lock.new"
    lock = os.open(new, os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    # Under its name it is locked from the start: nobody takes a folder for dead that is being made.
    new.rename(folder / "lock")
    return lock


def _remove_leftovers(nvme_path: Path) -> None:
    """Remove the folders of processes that were killed."""
    for path in nvme_path.glob(f"{_PREFIX}*/lock"):
        with suppress(OSError):  # in use, or somebody else removes it at this moment
            lock = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
                _log.warning("removed what a killed run left on disk: %s", path.parent)
            finally:
                os.close(lock)
