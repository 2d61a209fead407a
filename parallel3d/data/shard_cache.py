"""A node's cache of shards: fetched whole and ahead, as ids; the oldest are dropped behind.

A shard is a folder `<cache>/streams/<key>/` with the file ids.bin. It appears complete or not at
all (`cache.staged`). All ranks and runs of a node share the folder. A process that wants to fetch a
shard takes its lock and reserves the bytes that it needs in `<key>.need`; shards that were not used
for the longest time are removed until they fit. So the folder never exceeds its limit.
"""

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from parallel3d.base.errors import DataError
from parallel3d.base.lock import Lock
from parallel3d.data.cache import locked, staged

IDS = "ids.bin"
NAP_SECONDS = 0.05
# Bytes of a shard's folder beside its ids: its manifest.
EXTRA_BYTES = 4096


class LostShard(DataError):
    """A shard that is missing, truncated, or no longer that of the manifest."""


@dataclass(frozen=True)
class Shard:
    """A shard of a manifest."""

    manifest: Path
    """The manifest's folder."""
    number: int
    key: str
    """Digest of the shard's contents and of what its ids depend on."""
    name: str
    num_bytes: int
    """Bytes of its ids."""
    fetch_bytes: int
    """Most bytes on the disk while it is fetched, besides its ids."""


class ShardCache:
    """The shards in a folder of at most `limit` bytes; see the module's docstring.

    - `fetch(shard, folder)` writes ids.bin to a folder; it raises LostShard or DataError
    - `window`: shards whose samples are shuffled together; None: all of a stream
    - `skips`: a lost shard is recorded, so that samples of other shards can replace its own
    - `waiting_for`: the shard that a reader waits for, "" if none does
    """

    def __init__(
        self,
        folder: Path,
        limit: int,
        fetch: Callable[[Shard, Path], None],
        *,
        window: int | None = None,
        skips: bool = False,
    ) -> None:
        self.folder, self.limit, self.window, self.skips = folder, limit, window, skips
        self.waiting_for = ""
        self._fetch = fetch
        self._wanted: dict[object, list[Shard]] = {}
        self._changed, self._closed = threading.Event(), False
        self._thread: threading.Thread | None = None

    def want(self, owner: object, shards: Sequence[Shard]) -> None:
        """Fetch these shards ahead, the first ones first; they replace the owner's earlier ones."""
        if self._wanted.get(owner) == shards:
            return
        self._wanted[owner] = list(shards)
        self._changed.set()
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._work, name="shards", daemon=True)
            self._thread.start()

    def read(self, shard: Shard, dtype: np.dtype, start: int, count: int) -> np.ndarray:
        """Return `count` ids of a shard from the `start`-th on; wait until it is there.

        A negative `start` counts from the end of the file.
        """
        ids = np.empty(count, dtype)
        while True:
            # Opened for each read: an open file would keep its bytes on the disk after its removal.
            with suppress(FileNotFoundError), open(self._ids(shard), "rb", buffering=0) as file:
                file.seek(start * dtype.itemsize, os.SEEK_END if start < 0 else os.SEEK_SET)
                if file.readinto(ids.view(np.uint8).data) == ids.nbytes:
                    os.utime(self._ids(shard))
                    return ids
                raise DataError(f"{self._ids(shard)} is truncated; remove {self.folder}")
            self.load(shard)

    def load(self, shard: Shard) -> None:
        """Wait until a shard is there, and fetch it if nobody else does; see `fetch`."""
        self.waiting_for = shard.name
        try:
            while not self._try(shard, is_urgent=True):
                time.sleep(NAP_SECONDS)
        finally:
            self.waiting_for = ""

    def is_lost(self, shard: Shard) -> bool:
        """Wait until a shard is there; return True if it is lost, which is reported once a node."""
        if not self.skips:
            return False
        if self._beside(shard, "lost").exists():
            return True
        try:
            self.load(shard)
        except LostShard as error:
            self._skip(shard, error)
            return True
        return False

    def close(self) -> None:
        """End the thread after the shard that it is fetching."""
        self._closed = True
        self._changed.set()
        if self._thread:
            self._thread.join(5.0)

    def _skip(self, shard: Shard, error: LostShard) -> None:
        """Record a lost shard for all processes of the node, and report it once."""
        with suppress(FileExistsError), open(self._beside(shard, "lost"), "x") as file:
            file.write(str(error))
            count = len([*self.folder.glob("*.lost")])
            print(f"skipped shard {count} of this node: {error}", file=sys.stderr, flush=True)

    def _ids(self, shard: Shard) -> Path:
        return self.folder / shard.key / IDS

    def _beside(self, shard: Shard, suffix: str) -> Path:
        return self.folder / f"{shard.key}.{suffix}"

    def _work(self) -> None:
        """Fetch the wanted shards until `close`; readers raise what fails here."""
        failed: set[str] = set()
        while not self._closed:
            self._changed.clear()
            missing = [
                shard
                for shard in self._all_wanted()
                if shard.key not in failed and not self._ids(shard).exists()
            ]
            for shard in missing:
                if self._changed.is_set():
                    break
                try:
                    self._try(shard)
                except Exception as error:
                    failed.add(shard.key)
                    if self.skips and isinstance(error, LostShard):
                        self._skip(shard, error)
            # Others may be fetching, or there is no room until the next group is wanted.
            self._changed.wait(NAP_SECONDS * 4 if missing else None)

    def _all_wanted(self) -> list[Shard]:
        return [shard for shards in [*self._wanted.values()] for shard in shards]

    def _try(self, shard: Shard, is_urgent: bool = False) -> bool:
        """Return True if a shard is there now; fetch it if nobody does and it fits.

        Wanted shards make room for one that is urgent, because a reader waits for it.
        """
        if self._ids(shard).exists():
            return True
        self.folder.mkdir(parents=True, exist_ok=True)
        lock, need = Lock(self._beside(shard, "lock")), self._beside(shard, "need")
        if lock.try_to_take() is not None:
            return False
        try:
            if self._ids(shard).exists():
                return True
            if not self._reserve(shard, need, is_urgent):
                return False
            with staged(self.folder / shard.key) as folder:
                self._fetch(shard, folder)
            return True
        except OSError as error:
            raise DataError(
                f"{self.folder} cannot be written ({error.strerror or error}); set data.cache to a"
                " writable folder, and data.stream_cache_bytes to the space that it may use"
            ) from error
        finally:
            need.unlink(missing_ok=True)
            lock.release()

    def _reserve(self, shard: Shard, need: Path, is_urgent: bool) -> bool:
        """Make room for a shard and reserve it; return False if others must finish first."""
        keep = {wanted.key for wanted in self._all_wanted()}
        total = shard.num_bytes + shard.fetch_bytes + EXTRA_BYTES
        with locked(self.folder / "room", lambda: None):
            free = self.limit - total - sum(map(_reserved, self.folder.glob("*.need")))
            folders = sorted(_used(self.folder))
            free -= sum(size for _, size, _ in folders)
            for _, size, folder in folders:
                if free >= 0:
                    break
                if is_urgent or folder.name not in keep:
                    shutil.rmtree(folder, ignore_errors=True)
                    free += size
            if free >= 0:
                need.write_text(str(total))
        return free >= 0


def _used(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield the last use, the bytes and the folder of each complete shard."""
    for ids in folder.glob(f"*/{IDS}"):
        with suppress(OSError):
            if ids.parent.suffix != ".partial":
                state = ids.stat()
                yield state.st_mtime, state.st_size + EXTRA_BYTES, ids.parent


def _reserved(need: Path) -> int:
    """Return the bytes that a living process has reserved; remove what a killed one left."""
    lock = Lock(need.with_suffix(".lock"))
    if lock.try_to_take() is None:
        shutil.rmtree(need.with_suffix(".partial"), ignore_errors=True)
        need.unlink(missing_ok=True)
        lock.release()
        return 0
    with suppress(OSError, ValueError):
        return int(need.read_text())
    return 0
