"""The ids of a stream of shards as one array, of which only a few shards are on the disk."""

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from parallel3d.base.errors import DataError
from parallel3d.base.masking import mask
from parallel3d.data.ids.spans import IdArray
from parallel3d.data.shard_cache import EXTRA_BYTES, Shard, ShardCache
from parallel3d.data.shard_order import ShardOrder, windows_per_shard

SHARDS, HEADS = "shards.json", "heads.bin"


class ShardedTokens(IdArray):
    """The ids [num_tokens] of a manifest's shards, in their order; see `streams`.

    - `head_length`: ids at the beginning of each shard that the manifest has, so that a sample
      which ends in the next shard does not need it
    - `num_bytes_needed`: the least limit of the cache with which no shard is fetched twice an epoch

    Without a cache nothing can be read.
    """

    def __init__(self, manifest: Path, meta: dict[str, Any], cache: ShardCache | None) -> None:
        self.dtype, self._cache = np.dtype(meta["dtype"]), cache
        entries = json.loads((manifest / SHARDS).read_text())
        self.num_tokens = np.array([entry["tokens"] for entry in entries], np.int64)
        self.firsts = np.concatenate([[0], np.cumsum(self.num_tokens)])
        self.shape = (int(self.firsts[-1]),)
        self.head_length = int(meta["stream"]["head_length"])
        self.num_documents = np.array([entry["documents"] for entry in entries], np.int64)
        if self.head_length:
            shape = len(entries), self.head_length
            self._heads = np.memmap(manifest / HEADS, self.dtype, mode="r", shape=shape)
        self.shards = [
            Shard(
                manifest=manifest,
                number=number,
                key=entry["key"],
                name=mask(entry["files"][0]["path"]),
                num_bytes=entry["tokens"] * self.dtype.itemsize + entry.get("beside_ids", 0),
                fetch_bytes=entry["fetch_bytes"],
            )
            for number, entry in enumerate(entries)
        ]
        self._order = lru_cache(2)(self._make_order)

    @property
    def num_bytes_needed(self) -> int:
        """The least limit of the cache: two windows of the largest shards, one being fetched."""
        sizes = sorted((shard.num_bytes for shard in self.shards), reverse=True)
        window = len(sizes) if self._cache is None else self._cache.window or len(sizes)
        folders = min(len(sizes), 2 * window)
        fetched = max(shard.fetch_bytes for shard in self.shards)
        return sum(sizes[:folders]) + fetched + (folders + 1) * EXTRA_BYTES

    def sample_starts(self, seed: int, index: np.ndarray, sequence_length: int) -> np.ndarray:
        """Return the first token of the sample at each global index; fetch its shards ahead."""
        order, cache = self._order(sequence_length), self._open_cache()
        now, following = order.wanted(seed, index)
        cache.want(self, [self.shards[number] for number in dict.fromkeys([*now, *following])])
        starts = order.sample_index(seed, index) * sequence_length
        if cache.skips:
            numbers = self._shard_of(starts)
            for number in np.unique(numbers).tolist():
                if cache.is_lost(self.shards[number]):
                    here = numbers == number
                    starts[here] = self._replaced(starts[here], number, sequence_length)
        return starts

    @property
    def waiting_for(self) -> str:
        """The shard that a reader waits for; "" if none does."""
        return self._cache.waiting_for if self._cache else ""

    def close(self) -> None:
        """End the thread that fetches shards."""
        if self._cache:
            self._cache.close()

    def _open_cache(self) -> ShardCache:
        assert self._cache, "opened without a cache"
        return self._cache

    def _make_order(self, sequence_length: int) -> ShardOrder:
        window = self._open_cache().window or len(self.shards)
        return ShardOrder(windows_per_shard(self.num_tokens, sequence_length), window)

    def _shard_of(self, positions: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.firsts, positions, side="right") - 1

    def _replaced(self, starts: np.ndarray, lost: int, sequence_length: int) -> np.ndarray:
        """Return the starts of samples of the next usable shard, for those of a lost one."""
        count = len(self.shards)
        for number in (n % count for n in range(lost + 1, lost + count)):
            room = int(self.num_tokens[number]) - sequence_length
            if room > 0 and not self._open_cache().is_lost(self.shards[number]):
                first = self.firsts[number]
                return np.asarray(first + (starts - self.firsts[lost]) % room)
        raise DataError("all shards are lost; restore them, or make the manifest again")

    def _read(self, windows: Sequence[tuple[int, int]]) -> np.ndarray:
        pieces = chain.from_iterable(self._pieces(*window) for window in windows)
        return np.concatenate([np.empty(0, self.dtype), *pieces])

    def _pieces(self, first: int, last: int) -> Iterator[np.ndarray]:
        """Yield the ids first .. last - 1, from shard to shard."""
        begin, number = first, int(self._shard_of(np.array(first)))
        while first < last:
            start, end = self.firsts[number : number + 2].tolist()
            if first > begin and last - first <= self.head_length:
                yield self._heads[number, : last - first]
                return
            end = min(end, last)
            if end > first:
                shard = self.shards[number]
                yield self._open_cache().read(shard, self.dtype, first - start, end - first)
            first, number = end, number + 1
