"""What was found in another program's file of ids, kept for as long as the file is untouched."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from parallel3d.base.atomic import replaced
from parallel3d.base.errors import DataError
from parallel3d.config.data import DataConfig, PartConfig
from parallel3d.data.cache import prune
from parallel3d.data.corpus_folder import digest_of
from parallel3d.data.documents import DAYS_KEPT, SECONDS_UNTIL_SETTLED
from parallel3d.data.ids import megatron
from parallel3d.data.ids.check import Checked, Vocabulary, check
from parallel3d.data.ids.files import TokenFile, is_file
from parallel3d.data.ids.remote import is_url, version_of

# Part of an index's name: raise it when what is found in the same file changes.
INDEX_FORMAT = 1


def indexed(
    file: TokenFile,
    section: DataConfig | PartConfig,
    vocabulary: Vocabulary,
    indexes: Path,
    on_ids: Any,
) -> Checked:
    """Look through a file, unless that was done before and is known of the file as it is."""
    settings = (section.source, section.token_field, section.check_ids, file.dtype.str, vocabulary)
    before = _signature(file, settings)
    index = indexes / f"{before}.npz"
    with suppress(OSError, ValueError, KeyError, TypeError), np.load(index) as kept:
        checked = Checked(**{name: kept[name][()] for name in kept.files})
        os.utime(index)
        return checked
    started = time.time()
    checked = check(file, vocabulary, sample=section.check_ids == "sample", on_ids=on_ids)
    if _signature(file, settings) != before:
        raise DataError(f"{file.name} changed while it was read; run it again")
    # A cache that cannot be written is no matter here: it only saves time.
    with suppress(OSError):
        if is_url(file.path) or _settled(file.path, started):
            indexes.mkdir(parents=True, exist_ok=True)
            with replaced(index, shared=True) as partial, open(partial, "wb") as opened:
                np.savez(opened, **vars(checked))
            prune(indexes, DAYS_KEPT)
    return checked


def _settled(path: str, started: float) -> bool:
    state = os.stat(path)
    return started - max(state.st_mtime, state.st_ctime) > SECONDS_UNTIL_SETTLED


def _signature(file: TokenFile, settings: tuple[Any, ...]) -> str:
    """Give what stands for a file and what lies beside it, as they are now."""
    remote = is_url(file.path)
    name = file.path if remote else os.path.realpath(file.path)
    parts: list[Any] = [INDEX_FORMAT, name, *settings]
    for path in (file.path, megatron.index_of(file.path), f"{file.path}.index"):
        if remote:
            parts.append(version_of(path) if is_file(path) else None)
            continue
        with suppress(OSError):
            state = os.stat(path)
            parts += state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns
    return digest_of(*parts)
