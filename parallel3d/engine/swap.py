"""Swap folders of NVMe offload: one for each engine and rank.

DeepSpeed names its swap files by rank and parameter and never removes them, so two engines or runs
in one folder would overwrite each other's files. Each engine therefore has its own folder on each
rank. It is removed when the engine is closed or the process exits; if the process was killed, the
next run removes it.
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
_locks: dict[Path, int] = {}  # this process's folders and their lock files


def make_folder(nvme_path: str, mesh: Mesh, setting: str) -> Path:
    """Create a swap folder for this rank under `nvme_path`; remove those of killed runs.

    Collective: raise ConfigError, which names `setting`, on all ranks if one cannot write there.
    """

    def make() -> Path:
        with _naming(nvme_path, mesh, setting):
            _remove_leftovers(Path(nvme_path))
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=nvme_path))
            _locks[folder] = _lock(folder)
            return folder

    return agree(mesh, make)


def check_writable(nvme_path: str, mesh: Mesh, setting: str) -> None:
    """Raise ConfigError if this rank cannot write under `nvme_path`; leave no file there."""
    with _naming(nvme_path, mesh, setting), tempfile.TemporaryFile(dir=nvme_path) as file:
        file.write(b"a byte")


@contextmanager
def _naming(nvme_path: str, mesh: Mesh, setting: str) -> Iterator[None]:
    """Turn an OSError into a ConfigError that names the setting."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f'{setting} = "{nvme_path}": rank {mesh.rank} cannot write there ({error.strerror}); '
            "use a folder that exists and is writable on every node, on its NVMe drive"
        ) from None


@atexit.register
def remove_folders() -> None:
    """Remove all swap folders of this process, and their files."""
    while _locks:
        folder, lock = _locks.popitem()
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _lock(folder: Path) -> int:
    """Lock the folder as in use until this process ends, however it ends."""
    new = folder / "lock.new"
    lock = os.open(new, os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    # Locked before it has its final name, so no other process can take the folder for abandoned.
    new.rename(folder / "lock")
    return lock


def _remove_leftovers(nvme_path: Path) -> None:
    """Remove the folders of processes that were killed."""
    for path in nvme_path.glob(f"{_PREFIX}*/lock"):
        with suppress(OSError):  # in use, or being removed by another process
            lock = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
                _log.warning("removed a swap folder that a killed run left behind: %s", path.parent)
            finally:
                os.close(lock)
