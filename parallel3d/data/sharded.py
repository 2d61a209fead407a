"""The ids of a stream of shards as one array, of which only a few shards are on the disk.

Where the tokens of text are counted as its shards are read (`TokensAsRead`), the order is that of
the documents, whose number in each shard the manifest has: the shards are permuted and cut into
groups (`ShardOrder`), and the documents of a group are shuffled together. They follow each other
and are cut into samples, which are shuffled, too. So a sample's place in its group is a function of
seed and index alone. The group of an index depends on the tokens of all shards before it. They are
counted when the shards are read, and noted beside the manifest:

    counts/<shard>-<tokens>    an empty file for each shard that was read

Where a count is missing, the shard is read again.

A node caches shards: fetched whole and ahead, as ids; the oldest are dropped behind. A shard is a
folder `<cache>/streams/<key>/` with the file ids.bin. It appears complete or not at all
(`cache.staged`). All ranks and runs of a node share the folder. A process that wants to fetch a
shard takes its lock and reserves the bytes that it needs in `<key>.need`; shards that were not used
for the longest time are removed until they fit. So the folder never exceeds its limit.
"""

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from parallel3d.base.errors import DataError
from parallel3d.base.lock import Lock
from parallel3d.base.masking import mask
from parallel3d.data.cache import locked, staged
from parallel3d.data.ids.spans import IdArray
from parallel3d.data.order import (
    ShardOrder,
    bounds_of,
    each_number,
    sample_index,
    windows_per_shard,
)

IDS = "ids.bin"
SHARDS = "shards.json"
HEADS = "heads.bin"
# The first token of a sample is GROUP × its group + its place in the group.
GROUP = 2**40
# The order of the samples must not resemble that of the documents.
_SAMPLES = 0x53414D504C45
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
    entry: dict[str, Any]
    """The entry of the shard in the manifest: see `streams`."""
    key: str
    """Digest of the shard's contents and of what its ids depend on."""
    name: str
    num_bytes: int
    """Bytes of its ids."""
    fetch_bytes: int
    """Most bytes on the disk while it is fetched, besides its ids."""

    @classmethod
    def of(cls, manifest: Path, entry: dict[str, Any], dtype: np.dtype) -> "Shard":
        """Return the shard of an entry of a manifest with ids of this type."""
        return cls(
            manifest=manifest,
            entry=entry,
            key=entry["key"],
            name=mask(entry["files"][0]["path"]),
            num_bytes=entry["tokens"] * dtype.itemsize + entry.get("beside_ids", 0),
            fetch_bytes=entry["fetch_bytes"],
        )


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
        self.folder = folder
        self.limit = limit
        self.window = window
        self.skips = skips
        self.waiting_for = ""
        self._fetch = fetch
        self._wanted: dict[object, list[Shard]] = {}
        self._changed = threading.Event()
        self._closed = False
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
            missing = []
            for shard in self._all_wanted():
                if shard.key not in failed and not self._ids(shard).exists():
                    missing.append(shard)
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
        owners = list(self._wanted.values())  # another thread may add one
        return list(chain.from_iterable(owners))

    def _try(self, shard: Shard, is_urgent: bool = False) -> bool:
        """Return True if a shard is there now; fetch it if nobody does and it fits.

        Wanted shards make room for one that is urgent, because a reader waits for it.
        """
        if self._ids(shard).exists():
            return True
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = Lock(self._beside(shard, "lock"))
        need = self._beside(shard, "need")
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
                f"{self.folder} cannot be filled ({error}); set data.cache to a writable folder,"
                " and data.stream_cache_bytes to the space that it may use"
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


class ShardedTokens(IdArray):
    """The ids [num_tokens] of a manifest's shards, in their order; see `streams`.

    - `head_length`: ids at the beginning of each shard that the manifest has, so that a sample
      which ends in the next shard does not need it
    - `num_bytes_needed`: the least limit of the cache with which no shard is fetched twice an epoch

    Without a cache nothing can be read.
    """

    def __init__(self, manifest: Path, meta: dict[str, Any], cache: ShardCache | None) -> None:
        self.dtype = np.dtype(meta["dtype"])
        self.cache = cache
        entries = json.loads((manifest / SHARDS).read_text())
        self.num_tokens = np.array([entry["tokens"] for entry in entries], np.int64)
        self.firsts = bounds_of(self.num_tokens)
        self.shape = (int(self.firsts[-1]),)
        self.head_length = int(meta["stream"]["head_length"])
        self.num_documents = np.array([entry["documents"] for entry in entries], np.int64)
        if self.head_length:
            heads = np.memmap(manifest / HEADS, self.dtype, mode="r")
            self._heads = heads.reshape(len(entries), self.head_length)
        self.shards = [Shard.of(manifest, entry, self.dtype) for entry in entries]
        self._order = lru_cache(2)(self._make_order)

    @property
    def num_bytes_needed(self) -> int:
        """The least limit of the cache: two windows of the largest shards, one being fetched."""
        sizes = sorted((shard.num_bytes for shard in self.shards), reverse=True)
        window = len(sizes) if self.cache is None else self.cache.window or len(sizes)
        folders = min(len(sizes), 2 * window)
        fetched = max(shard.fetch_bytes for shard in self.shards)
        return sum(sizes[:folders]) + fetched + (folders + 1) * EXTRA_BYTES

    def sample_starts(self, seed: int, index: np.ndarray, sequence_length: int) -> np.ndarray:
        """Return the first token of the sample at each global index; fetch its shards ahead."""
        order = self._order(sequence_length)
        cache = self._open_cache()
        cache.want(self, [self.shards[number] for number in order.wanted(seed, index)])
        starts = order.sample_index(seed, index) * sequence_length
        if cache.skips:
            for number, here in each_number(self._shard_of(starts)):
                if cache.is_lost(self.shards[number]):
                    starts[here] = self._replaced(starts[here], number, sequence_length)
        return starts

    def _open_cache(self) -> ShardCache:
        assert self.cache, "opened without a cache"
        return self.cache

    def _make_order(self, sequence_length: int) -> ShardOrder:
        window = self._open_cache().window or len(self.shards)
        return ShardOrder(windows_per_shard(self.num_tokens, sequence_length), window)

    def _shard_of(self, positions: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.firsts, positions, side="right") - 1

    def _replaced(self, starts: np.ndarray, lost: int, sequence_length: int) -> np.ndarray:
        """Return the starts of samples of the next usable shard, for those of a lost one."""
        count = len(self.shards)
        for following in range(lost + 1, lost + count):
            number = following % count
            room = int(self.num_tokens[number]) - sequence_length
            if room > 0 and not self._open_cache().is_lost(self.shards[number]):
                return np.asarray(self.firsts[number] + (starts - self.firsts[lost]) % room)
        raise DataError("all shards are lost; restore them, or make the manifest again")

    def _read(self, windows: Sequence[tuple[int, int]]) -> np.ndarray:
        pieces = chain.from_iterable(self._pieces(*window) for window in windows)
        return np.concatenate([np.empty(0, self.dtype), *pieces])

    def _pieces(self, first: int, last: int) -> Iterator[np.ndarray]:
        """Yield the ids first .. last - 1, from shard to shard."""
        begin = first
        number = int(self._shard_of(np.array(first)))
        while first < last:
            start, end = self.firsts[number : number + 2].tolist()
            if first > begin and last - first <= self.head_length:
                yield self._heads[number, : last - first]
                return
            end = min(end, last)
            if end > first:
                yield self._open_cache().read(
                    self.shards[number], self.dtype, first - start, end - first
                )
            first = end
            number += 1


class TokensAsRead(ShardedTokens):
    """Samples of a manifest with estimated counts, for one seed and sequence length.

    Shards have the lengths of their documents, int64, after their ids. `shape` is an estimate.
    """

    def __init__(self, manifest: Path, meta: dict[str, Any], cache: ShardCache | None) -> None:
        super().__init__(manifest, meta, cache)
        self._folder = manifest / "counts"
        self._counts: dict[int, int] = {}
        for path in self._folder.glob("*-*"):
            number, _, num_noted = path.name.partition("-")
            self._counts[int(number)] = int(num_noted)
        self._use = (0, 0)
        """Seed and sequence length."""
        self._begins = [0]
        """The first sample of each group."""
        self._lock = threading.Lock()
        self._group = lru_cache(2)(self._make_group)

    def sample_starts(self, seed: int, index: np.ndarray, sequence_length: int) -> np.ndarray:
        """Return the first token of the sample at each global index; fetch its shards ahead."""
        assert self._use in ((0, 0), (seed, sequence_length)), "one order for each object"
        self._use = seed, sequence_length
        with self._lock:
            while self._begins[-1] <= index.max():
                self._begins.append(self._begins[-1] + self._num_samples(len(self._begins) - 1))
            begins = np.array(self._begins)
        numbers = np.searchsorted(begins, index, side="right") - 1
        self._want(int(numbers.min()))
        starts = numbers * GROUP
        for number, here in each_number(numbers):
            count = int(begins[number + 1] - begins[number])
            places = number * count + index[here] - begins[number]
            starts[here] += sample_index(seed ^ _SAMPLES, places, count) * sequence_length
        return starts

    def __getitem__(self, key: slice | ArrayLike) -> np.ndarray:
        """Return the ids of windows [n, count] that begin where `sample_starts` says."""
        return np.stack([self._window(int(row[0]), len(row)) for row in np.asarray(key)])

    def _make_order(self, _: int) -> ShardOrder:
        return ShardOrder(self.num_documents, self._open_cache().window or len(self.shards))

    def _want(self, number: int) -> None:
        """Fetch the shards of a group and of the next one ahead."""
        shards = self._order(0).shards_of(self._use[0], [number, number + 1])
        self._open_cache().want(self, [self.shards[shard] for shard in shards])

    def _num_samples(self, number: int) -> int:
        """Return the number of samples of a group; shards that nobody has counted are read."""
        if number == self._order(0).num_groups and not self._begins[-1]:
            raise DataError(
                f"no window of data.stream_window = {self._open_cache().window} shards has a"
                f" sample of {self._use[1]} tokens; raise it, or lower sequence_length"
            )
        members = self._order(0).shards_of(self._use[0], [number])
        for shard in sorted({*members} - self._counts.keys()):
            self._want(number)
            self._lengths(shard)
        return max(0, sum(self._counts[shard] for shard in members) - 1) // self._use[1]

    def _lengths(self, number: int) -> np.ndarray:
        """Return the tokens of each document of a shard, and note their sum."""
        documents = int(self.num_documents[number])
        shard = self.shards[number]
        lengths = self._open_cache().read(shard, np.dtype(np.int64), -documents, documents)
        count = int(lengths.sum())
        if self._counts.setdefault(number, count) != count:
            raise DataError(
                f"{shard.name} has {count:,} tokens, but {self._counts[number]:,} were counted"
                " with another version of the tokenizers; make the manifest again"
            )
        with suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            (self._folder / f"{number}-{count}").touch()
        return lengths

    def _make_group(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return each document's shard and first token there, and the documents' bounds."""
        order = self._order(0)
        seed = self._use[0]
        members, index = order.group(seed, number)
        documents = order.sample_index(seed, np.array(index))
        firsts = order.firsts[members]
        lengths = [self._lengths(shard) for shard in members.tolist()]
        places = np.searchsorted(firsts, documents, side="right") - 1
        rows = bounds_of([*map(len, lengths)])[places] + documents - firsts[places]
        begins = np.concatenate([np.cumsum(own) - own for own in lengths])[rows]
        return members[places], begins, bounds_of(np.concatenate(lengths)[rows])

    def _window(self, start: int, count: int) -> np.ndarray:
        """Return consecutive ids of a group's documents."""
        number, first = divmod(start, GROUP)
        shards, begins, bounds = self._group(number)
        a = bounds.searchsorted(first, "right") - 1
        b = bounds.searchsorted(first + count)
        cuts = np.clip(bounds[a : b + 1], first, first + count)
        places = begins[a:b] + cuts[:-1] - bounds[a:b]
        pieces = zip(shards[a:b].tolist(), places.tolist(), np.diff(cuts).tolist(), strict=True)
        return np.concatenate(
            [
                self._open_cache().read(self.shards[shard], self.dtype, place, size)
                for shard, place, size in pieces
            ]
        )
