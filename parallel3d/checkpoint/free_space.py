"""Checks of the room for a checkpoint: on the disk, and in host memory for a copy."""

import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

_SPARE = 0.05  # of the host's memory, which a copy leaves free
_PROBE = 32 * 2**20  # bytes
_CGROUP = Path("/sys/fs/cgroup")


def disk_lacks(folder: Path, num_bytes: int) -> int:
    """Bytes by which the disk of `folder` is too small for `num_bytes` more; 0 if they fit."""
    while not folder.exists():
        folder = folder.parent
    # Names and the small files come on top.
    return max(0, num_bytes + 2**20 - shutil.disk_usage(folder).free)


def memory_lacks(num_bytes: int, num_ranks: int) -> int:
    """Bytes by which a rank's share of free host memory is too small; 0 if `num_bytes` fit.

    `num_ranks` ranks of this host each need as much.
    """
    if not num_bytes:
        return 0
    memory = psutil.virtual_memory()
    free = min(memory.available, _limit() - psutil.Process().memory_info().rss)
    return max(0, num_bytes - int(free - _SPARE * memory.total) // num_ranks)


def _limit() -> int:
    """The memory that a container is given, if it says so."""
    with suppress(OSError, ValueError):
        return int((_CGROUP / "memory.max").read_text())
    return 2**63


def seconds_to_write(folder: Path, num_bytes: int) -> float:
    """Approximate seconds until `num_bytes` are on the disk of `folder`.

    By a file of 32 MiB that is written and removed; 0 where the bytes are fewer than that.
    """
    if num_bytes < _PROBE:
        return 0.0
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_PROBE))
        file.flush()
        os.fsync(file.fileno())
    return (time.perf_counter() - start) * num_bytes / _PROBE
