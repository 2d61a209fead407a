"""Files with a URL such as s3://bucket/file, read in ranges through fsspec.

fsspec is a dependency of `datasets`. The file system of a protocol is a separate package (s3fs,
gcsfs), which also handles credentials.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, cast

import numpy as np
import xxhash

from parallel3d.base.errors import DataError
from parallel3d.base.masking import MASK

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


class Range(NamedTuple):
    """Bytes start .. end - 1 of a file."""

    path: str
    start: int
    end: int


def is_url(path: str) -> bool:
    """True if `path` has a protocol."""
    return "://" in path


def size_of(url: str) -> int | None:
    """Return a file's size in bytes; None if it does not exist."""
    with system_of(url) as (system, path):
        return int(system.size(path)) if system.isfile(path) else None


def version_of(url: str) -> str:
    """Return an identifier of the file's current contents, as far as its file system has one."""
    with system_of(url) as (system, path):
        return str(system.ukey(path))


def open_url(url: str) -> BinaryIO:
    """Open a file to read its first bytes."""
    with system_of(url) as (system, path):
        return cast(BinaryIO, system.open(path, "rb", block_size=2**16))


def matching(pattern: str) -> list[str]:
    """Return the sorted URLs of the files that match a URL or glob; raise DataError if none do."""
    with system_of(pattern) as (system, path):
        paths = [path] if system.isfile(path) else system.glob(path)
        urls = sorted(str(system.unstrip_protocol(p)) for p in paths if system.isfile(p))
    if not urls:
        raise DataError(
            f"data.paths: {pattern!r} matches no file; use the URL of a file, or a glob"
        )
    return urls


def read_ranges(ranges: Sequence[Range]) -> list[bytes]:
    """Return the bytes of each range.

    Ranges in the same folder are requested together, concurrently if the file system supports it.
    Raises DataError if a file is shorter.
    """
    blocks: list[bytes] = []
    for _, group in groupby(ranges, lambda span: span.path.rpartition("/")[0]):
        urls, starts, ends = zip(*group, strict=True)
        names = [url.rpartition("/")[2] for url in urls]
        with system_of(urls[0]) as (system, path):
            paths = [path.removesuffix(names[0]) + name for name in names]
            blocks += system.cat_ranges(paths, list(starts), list(ends), on_error="raise")
    for span, data in zip(ranges, blocks, strict=True):
        if len(data) != span.end - span.start:
            raise DataError(
                f"{span.path} is shorter than {span.end:,} bytes, to which its documents extend; it"
                " shrank since it was prepared. Write it again"
            )
    return blocks


@contextmanager
def system_of(url: str) -> Iterator[tuple["AbstractFileSystem", str]]:
    """Yield the file system of a URL or path, and the path in it; turn errors into DataErrors."""
    if f":{MASK}@" in url or f"={MASK}" in url:
        raise DataError(
            f"{url}: its password was masked when a run's config was saved; set data.paths to the"
            " URL with its password, or keep the password in fsspec's config files"
        )
    try:
        # The import takes half a second; local files do not need it.
        from fsspec.core import url_to_fs

        yield url_to_fs(url)
    except ImportError as error:
        raise DataError(
            f"{url} cannot be read: {error}; run `pip install parallel3d[remote]`, or install"
            " fsspec's package for this protocol"
        ) from error
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise DataError(
            f"{url} cannot be read ({reason}); check its name, your credentials and the network"
        ) from error


# Small, so that reading a sample at random transfers little more than the sample itself.
BLOCK = 2**16
WAYS = 16
# Key, digest and size of a block, and the time of its last use in seconds.
ENTRY = np.dtype([("key", "V16"), ("digest", "<u8"), ("size", "<i8"), ("used", "<f8")])
USED = ENTRY.itemsize - 8  # offset of the time in an entry
SET_BYTES = WAYS * (ENTRY.itemsize + BLOCK)


class BlockCache:
    """A set-associative cache of blocks by keys of 16 bytes, in a file of at most `limit` bytes.

    The file has entries [S, WAYS] of ENTRY, then blocks [S, WAYS] of BLOCK bytes. It is sparse, so
    it only takes the space of the blocks that were written. `limit` is SET_BYTES or more. The key
    determines the set; if the set is full, the least recently used block is replaced.

    Processes share the file without a lock: each entry has its block's digest, so a half-written
    block is not used. Raises DataError if the file cannot be written.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self._num_sets = limit // SET_BYTES
        assert self._num_sets, limit
        size = self._num_sets * SET_BYTES
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
            # With another limit, blocks at old positions are not found and are overwritten.
            if os.fstat(self._file.fileno()).st_size != size:
                self._file.truncate(size)
        except OSError as error:
            raise DataError(
                f"{path} cannot be written ({error.strerror or error}); set data.cache to a"
                " writable directory, or data.remote_cache_bytes to 0"
            ) from error

    def get(self, key: bytes) -> bytes | None:
        """Return the block of a key, or None if it is not cached or its digest differs."""
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
        """Store a block of at most BLOCK bytes; a full disk is ignored."""
        number, entries = self._set_of(key)
        same = np.flatnonzero(entries["key"] == np.void(key))
        now = time.time()
        # Bytes that were written under another limit may look like an entry from the future.
        used = np.where(entries["used"] <= now, entries["used"], -1.0)
        way = int(same[0]) if len(same) else int(used.argmin())
        entry = np.array([(key, xxhash.xxh3_64_intdigest(data), len(data), now)], ENTRY)
        with suppress(OSError):
            os.pwrite(self._file.fileno(), data, self._block_at(number, way))
            os.pwrite(self._file.fileno(), entry.tobytes(), self._entry_at(number, way))

    def _set_of(self, key: bytes) -> tuple[int, np.ndarray]:
        """Return the number of a key's set, and its entries: [WAYS] of ENTRY."""
        number = int.from_bytes(key[:8], "little") % self._num_sets
        size = WAYS * ENTRY.itemsize
        read = os.pread(self._file.fileno(), size, number * size)
        # Shorter if a process with a lower limit has just truncated the file.
        return number, np.frombuffer(read.ljust(size, b"\0"), ENTRY)

    def _entry_at(self, number: int, way: int) -> int:
        return (number * WAYS + way) * ENTRY.itemsize

    def _block_at(self, number: int, way: int) -> int:
        start = self._num_sets * WAYS * ENTRY.itemsize
        return start + (number * WAYS + way) * BLOCK


class RemoteFiles:
    """The remote files of one corpus, read through a cache of blocks.

    - `sizes`: size in bytes by URL
    - `corpus`: identifies the files' contents in the keys of cached blocks
    """

    def __init__(self, sizes: Mapping[str, int], corpus: str, cache: BlockCache | None) -> None:
        self._sizes, self._corpus, self._cache = sizes, corpus, cache

    def read(self, ranges: Sequence[Range]) -> list[bytes]:
        """Return the bytes of each range; missing blocks are fetched together. See read_ranges."""
        numbers_of = [range(r.start // BLOCK, -(-r.end // BLOCK)) for r in ranges]
        needed = {
            self._block(r.path, n) for r, ns in zip(ranges, numbers_of, strict=True) for n in ns
        }
        blocks: dict[Range, bytes] = {}
        if self._cache:
            cached = {block: self._cache.get(self._key(block)) for block in needed}
            blocks = {block: data for block, data in cached.items() if data is not None}
        missing = sorted(needed - blocks.keys())
        for block, data in zip(missing, read_ranges(missing), strict=True):
            blocks[block] = data
            if self._cache:
                self._cache.put(self._key(block), data)
        contents = []
        for r, numbers in zip(ranges, numbers_of, strict=True):
            joined = b"".join(blocks[self._block(r.path, n)] for n in numbers)
            first = numbers.start * BLOCK
            contents.append(joined[r.start - first : r.end - first])
        return contents

    def _block(self, url: str, number: int) -> Range:
        return Range(url, number * BLOCK, min((number + 1) * BLOCK, self._sizes[url]))

    def _key(self, block: Range) -> bytes:
        name = f"{self._corpus}\n{block.path}\n{block.start // BLOCK}"
        return blake2b(name.encode(), digest_size=16).digest()
