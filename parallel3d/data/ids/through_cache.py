"""Ranges of remote files, read through the cache of blocks on the local disk."""

import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from parallel3d.data.ids.blocks import BLOCK, BlockCache
from parallel3d.data.ids.ranges import Range, gathered, joined
from parallel3d.data.ids.remote import Unreachable, read_ranges

# Ranges with no more bytes between them are asked for as one.
GAP = 2**12
# Seconds until a network that failed is asked again, beside what its file system does by itself.
PAUSES = (1.0, 4.0, 16.0)
_Place = tuple[str, int]  # a file, and the number of a block in it


def _read(ranges: Sequence[Range]) -> list[bytes]:
    """The bytes of each range; where a network fails, it is asked again for a while."""
    for seconds in PAUSES:
        try:
            return read_ranges(ranges)
        except Unreachable:
            time.sleep(seconds)
    return read_ranges(ranges)


class RemoteFiles:
    """The remote files of one corpus, by URL; `sizes`: the bytes of each.

    `corpus` stands for their contents: a block of other contents is not taken for one of these.
    Without a `cache` nothing is kept.
    """

    def __init__(
        self,
        sizes: Mapping[str, int] | None = None,
        corpus: str = "",
        cache: BlockCache | None = None,
    ) -> None:
        self._sizes, self._corpus, self._cache = sizes or {}, corpus, cache

    def read(self, ranges: Sequence[Range]) -> list[bytes]:
        """The bytes of each range; blocks missing in the cache are fetched together.

        Raises DataError for what cannot be read.
        """
        if self._cache is None:
            return gathered(ranges, GAP, _read)
        places = {(r.path, n) for r in ranges for n in range(r.start // BLOCK, -(-r.end // BLOCK))}
        blocks: dict[_Place, bytes] = {}
        for place in places:
            if (kept := self._cache.get(self._key(place))) is not None:
                blocks[place] = kept
        runs = joined((self._range_of(place) for place in places - blocks.keys()), 0)
        for run, data in zip(runs, _read(runs), strict=True):
            for at in range(run.start, run.end, BLOCK):
                place = run.path, at // BLOCK
                blocks[place] = data[at - run.start : at - run.start + BLOCK]
                self._cache.put(self._key(place), blocks[place])
        return [self._cut(r, blocks) for r in ranges]

    def _range_of(self, place: _Place) -> Range:
        url, number = place
        return Range(url, number * BLOCK, min((number + 1) * BLOCK, self._sizes[url]))

    def _cut(self, wanted: Range, blocks: Mapping[_Place, bytes]) -> bytes:
        first = wanted.start // BLOCK
        numbers = range(first, -(-wanted.end // BLOCK))
        whole = b"".join(blocks[wanted.path, number] for number in numbers)
        return whole[wanted.start - first * BLOCK : wanted.end - first * BLOCK]

    def _key(self, place: _Place) -> bytes:
        url, number = place
        return blake2b(f"{self._corpus}\n{url}\n{number}".encode(), digest_size=16).digest()
