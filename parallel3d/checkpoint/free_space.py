"""Checks of free space for a checkpoint: on the disk, and in host memory for a copy."""

import shutil
from contextlib import suppress
from pathlib import Path

import psutil

_SPARE = 0.05  # fraction of the host's memory that a copy leaves free
_CGROUP = Path("/sys/fs/cgroup")


def missing_disk_bytes(folder: Path, num_bytes: int) -> int:
    """Return the bytes that the disk of `folder` lacks for `num_bytes` more; 0 if they fit."""
    while not folder.exists():
        folder = folder.parent
    # 1 MiB more for file names and small files.
    return max(0, num_bytes + 2**20 - shutil.disk_usage(folder).free)


def missing_memory_bytes(num_bytes: int, num_ranks: int) -> int:
    """Return the bytes of host memory that a rank lacks for `num_bytes`; 0 if they fit.

    - `num_ranks`: ranks on this host, each of which needs `num_bytes`.
    """
    if not num_bytes:
        return 0
    return max(0, num_bytes - free_memory(num_ranks))


def free_memory(num_ranks: int) -> int:
    """Return the bytes of free host memory for each of `num_ranks` ranks of this host."""
    memory = psutil.virtual_memory()
    free = min(memory.available, _limit() - psutil.Process().memory_info().rss)
    return int(free - _SPARE * memory.total) // num_ranks


def _limit() -> int:
    """Return the container's memory limit in bytes, or 2^63 if there is none."""
    with suppress(OSError, ValueError):
        return int((_CGROUP / "memory.max").read_text())
    return 2**63
