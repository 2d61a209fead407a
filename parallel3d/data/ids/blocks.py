"""Remote files, read in blocks that are kept in one file of a bounded size on the local disk.

A block belongs to one of S sets, which its key says, and has one of WAYS places there; where all
are taken, it takes the place of the one that was used longest ago. The file has

    entries    [S, WAYS] of ENTRY
    blocks     [S, WAYS] of BLOCK bytes

and takes room on the disk for what was written. Any number of processes share it without a lock: an
entry has the digest of its block, so what was half-written by a process that was killed, or by two
at once, is no block.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import numpy as np
import xxhash

from parallel3d.base.errors import DataError
from parallel3d.data.ids.remote import Range, read_ranges

# Small enough that samples from anywhere take little more than their own bytes.
BLOCK = 2**16
WAYS = 16
# Its key, digest and bytes, and when the block was used, in seconds.
ENTRY = np.dtype([("key", "V16"), ("digest", "<u8"), ("size", "<i8"), ("used", "<f8")])
USED = ENTRY.itemsize - 8  # where in an entry its time is
SET_BYTES = WAYS * (ENTRY.itemsize + BLOCK)


class BlockCache:
    """Blocks by their keys of 16 bytes, in the file `path` of at most `limit` bytes.

    The limit is SET_BYTES or more. Raises DataError if the file cannot be written.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self._num_sets = limit // SET_BYTES
        assert self._num_sets, limit
        size = self._num_sets * SET_BYTES
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
            # It had another limit: what is elsewhere now is not found, and written over in time.
            if os.fstat(self._file.fileno()).st_size != size:
                self._file.truncate(size)
        except OSError as error:
            raise DataError(
                f"{path} cannot be written ({error.strerror or error}); set data.cache to a"
                " directory that is writable, or data.remote_cache_bytes to 0"
            ) from error

    def get(self, key: bytes) -> bytes | None:
        """The block of a key, if it is cached with the bits that it came with."""
        number, entries = self._set_of(key)
        for way in map(int, np.flatnonzero(entries["key"] == np.void(key))):
            entry, size = entries[way], int(entries["size"][way])
            data = b""
            if 0 < size <= BLOCK:
                data = os.pread(self._file.fileno(), size, self._block_at(number, way))
            if data and xxhash.xxh3_64_intdigest(data) == entry["digest"]:
                with suppress(OSError):
                    at = self._entry_at(number, way) + USED
                    os.pwrite(self._file.fileno(), np.float64(time.time()).tobytes(), at)
                return data
        return None

    def put(self, key: bytes, data: bytes) -> None:
        """Keep a block of at most BLOCK bytes, unless the disk is full."""
        number, entries = self._set_of(key)
        same = np.flatnonzero(entries["key"] == np.void(key))
        now = time.time()
        # Bytes that another limit left here may pass for an entry of any time.
        used = np.where(entries["used"] <= now, entries["used"], -1.0)
        way = int(same[0]) if len(same) else int(used.argmin())
        entry = np.array([(key, xxhash.xxh3_64_intdigest(data), len(data), now)], ENTRY)
        with suppress(OSError):
            os.pwrite(self._file.fileno(), data, self._block_at(number, way))
            os.pwrite(self._file.fileno(), entry.tobytes(), self._entry_at(number, way))

    def _set_of(self, key: bytes) -> tuple[int, np.ndarray]:
        """The number of a key's set, and the entries there: [WAYS] of ENTRY."""
        number = int.from_bytes(key[:8], "little") % self._num_sets
        size = WAYS * ENTRY.itemsize
        read = os.pread(self._file.fileno(), size, number * size)
        # Shorter where a process with a lower limit has just cut it off.
        return number, np.frombuffer(read.ljust(size, b"\0"), ENTRY)

    def _entry_at(self, number: int, way: int) -> int:
        return (number * WAYS + way) * ENTRY.itemsize

    def _block_at(self, number: int, way: int) -> int:
        start = self._num_sets * WAYS * ENTRY.itemsize
        return start + (number * WAYS + way) * BLOCK


class RemoteFiles:
    """The remote files of one corpus, by URL; `sizes`: the bytes of each.

    `corpus` stands for their contents: a block of other contents is not taken for one of these.
    Without a `cache` nothing is kept.
    """

    def __init__(self, sizes: Mapping[str, int], corpus: str, cache: BlockCache | None) -> None:
        self._sizes, self._corpus, self._cache = sizes, corpus, cache

    def read(self, ranges: Sequence[Range]) -> list[bytes]:
        """The bytes of each range; blocks missing in the cache are fetched together.

        Raises DataError for what cannot be read.
        """
        numbers_of = [range(r.start // BLOCK, -(-r.end // BLOCK)) for r in ranges]
        wanted = {
            self._block(r.path, n) for r, ns in zip(ranges, numbers_of, strict=True) for n in ns
        }
        blocks: dict[Range, bytes] = {}
        if self._cache:
            kept = {block: self._cache.get(self._key(block)) for block in wanted}
            blocks = {block: data for block, data in kept.items() if data is not None}
        missing = sorted(wanted - blocks.keys())
        for block, data in zip(missing, read_ranges(missing), strict=True):
            blocks[block] = data
            if self._cache:
                self._cache.put(self._key(block), data)
        found = []
        for r, numbers in zip(ranges, numbers_of, strict=True):
            whole = b"".join(blocks[self._block(r.path, n)] for n in numbers)
            first = numbers.start * BLOCK
            found.append(whole[r.start - first : r.end - first])
        return found

    def _block(self, url: str, number: int) -> Range:
        return Range(url, number * BLOCK, min((number + 1) * BLOCK, self._sizes[url]))

    def _key(self, block: Range) -> bytes:
        name = f"{self._corpus}\n{block.path}\n{block.start // BLOCK}"
        return blake2b(name.encode(), digest_size=16).digest()
