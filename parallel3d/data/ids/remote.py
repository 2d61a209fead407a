"""Files with a URL, such as s3://bucket/file, read in ranges through fsspec.

fsspec comes with `datasets`; the file system of a protocol is a package of its own (s3fs, gcsfs),
which has its own ways to take credentials.
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

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


class Range(NamedTuple):
    """Bytes start .. end - 1 of a file."""

    path: str
    start: int
    end: int


def is_url(path: str) -> bool:
    """True if a path names a protocol."""
    return "://" in path


def size_of(url: str) -> int | None:
    """Return a file's size in bytes; None where there is no such file."""
    with _system_of(url) as (system, path):
        return int(system.size(path)) if system.isfile(path) else None


def version_of(url: str) -> str:
    """Return what changes with the file's contents, as far as its file system knows."""
    with _system_of(url) as (system, path):
        return str(system.ukey(path))


def open_url(url: str) -> BinaryIO:
    """Open a file to read its head."""
    with _system_of(url) as (system, path):
        return cast(BinaryIO, system.open(path, "rb", block_size=2**16))


def matching(pattern: str) -> list[str]:
    """Return the sorted URLs of the files that a URL or glob names; DataError if there are none."""
    with _system_of(pattern) as (system, path):
        paths = [path] if system.isfile(path) else system.glob(path)
        found = sorted(str(system.unstrip_protocol(p)) for p in paths if system.isfile(p))
    if not found:
        raise DataError(
            f"data.paths: {pattern!r} matches no file there; give the URL of a file, or a glob"
        )
    return found


def read_ranges(ranges: Sequence[Range]) -> list[bytes]:
    """Return the bytes of each range; those in a folder are requested at once where its system can.

    Raises DataError where a file has fewer.
    """
    found: list[bytes] = []
    for _, group in groupby(ranges, lambda wanted: wanted.path.rpartition("/")[0]):
        urls, starts, ends = zip(*group, strict=True)
        names = [url.rpartition("/")[2] for url in urls]
        with _system_of(urls[0]) as (system, path):
            paths = [path.removesuffix(names[0]) + name for name in names]
            found += system.cat_ranges(paths, list(starts), list(ends), on_error="raise")
    for wanted, data in zip(ranges, found, strict=True):
        if len(data) != wanted.end - wanted.start:
            raise DataError(
                f"{wanted.path} has fewer than the {wanted.end:,} bytes that belong to its"
                " documents: it shrank since it was prepared; write it again"
            )
    return found


@contextmanager
def _system_of(url: str) -> Iterator[tuple["AbstractFileSystem", str]]:
    """Yield the file system of a URL, and the path there; errors name the URL."""
    try:
        # Half a second to import, for those who name a URL.
        from fsspec.core import url_to_fs

        yield url_to_fs(url)
    except ImportError as error:
        raise DataError(
            f"{url} cannot be read: {error}; pip install parallel3d[remote], or the package that"
            " fsspec has for this protocol"
        ) from error
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise DataError(
            f"{url} cannot be read ({reason}); check its name, your credentials and the network"
        ) from error


# Small enough that samples from anywhere take little more than their own bytes.
BLOCK = 2**16
WAYS = 16
# Its key, digest and bytes, and when the block was used, in seconds.
ENTRY = np.dtype([("key", "V16"), ("digest", "<u8"), ("size", "<i8"), ("used", "<f8")])
USED = ENTRY.itemsize - 8  # where in an entry its time is
SET_BYTES = WAYS * (ENTRY.itemsize + BLOCK)


class BlockCache:
    """Blocks by their keys of 16 bytes, in the file `path` of at most `limit` bytes.

    The file has entries [S, WAYS] of ENTRY, then blocks [S, WAYS] of BLOCK bytes, and takes room
    for what was written; the limit is SET_BYTES or more. A key says its set; where all WAYS are
    taken there, it replaces the block that was used longest ago. Processes share the file without a
    lock: an entry has its block's digest, so what is half-written is no block. Raises DataError if
    the file cannot be written.
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
        """Return the block of a key, if it is cached with the bits that it came with."""
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
        """Return the number of a key's set, and the entries there: [WAYS] of ENTRY."""
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

    `corpus` stands for their contents, and tells their blocks from others'.
    """

    def __init__(self, sizes: Mapping[str, int], corpus: str, cache: BlockCache | None) -> None:
        self._sizes, self._corpus, self._cache = sizes, corpus, cache

    def read(self, ranges: Sequence[Range]) -> list[bytes]:
        """Return the bytes of each range; missing blocks are fetched together. Raises DataError."""
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
