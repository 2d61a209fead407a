"""Findings in a file (documents, ids), kept in the cache for as long as the file is untouched."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from parallel3d.base.atomic import replaced
from parallel3d.data.cache import prune

# A file that changed so lately may change again within its clock's tick, unseen.
SECONDS_UNTIL_SETTLED = 2.0
DAYS_KEPT = 30


def load(index: Path) -> dict[str, Any] | None:
    """The findings that were kept as `index`; None if there are none, or damaged ones."""
    with suppress(OSError, ValueError, KeyError, BadZipFile), np.load(index) as kept:
        found = {name: kept[name][()] for name in kept.files}
        os.utime(index)
        return found
    return None


def keep(index: Path, found: dict[str, Any]) -> None:
    """Keep findings as `index`, unless the cache cannot be written: it only saves time."""
    with suppress(OSError):
        index.parent.mkdir(parents=True, exist_ok=True)
        with replaced(index, shared=True) as partial, open(partial, "wb") as file:
            np.savez(file, **found)
        prune(index.parent, DAYS_KEPT)


def state_of(path: str) -> tuple[int, ...]:
    """Numbers that change when a file does; none where there is no file."""
    with suppress(OSError):
        state = os.stat(path)
        return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns
    return ()


def is_settled(path: str) -> bool:
    """Whether a file's last change was some time ago."""
    with suppress(OSError):
        state = os.stat(path)
        return time.time() - max(state.st_mtime, state.st_ctime) > SECONDS_UNTIL_SETTLED
    return False
