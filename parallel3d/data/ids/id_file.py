"""A file of token ids, by its path or URL: the positions of its documents, and reading its ids.

Files with a URL such as s3://bucket/file are read in ranges through fsspec, a dependency of
`datasets`. The file system of a protocol is a separate package (s3fs, gcsfs), which also handles
credentials.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
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

# Types of ids, by their names in configs and messages.
INTEGERS = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
}
# Types of the numbers beside ids; the names of floats are Arrow's.
NUMBERS = INTEGERS | {
    name: np.dtype(short).newbyteorder("<")
    for name, short in (("halffloat", "f2"), ("float", "f4"), ("double", "f8"))
}
NUMBERS |= {dtype.name: dtype for dtype in NUMBERS.values()}
# Ids read at a time: 16 MB as uint32.
BLOCK = 2**22
# Small, so that reading a sample at random transfers little more than the sample itself.
REMOTE_BLOCK = 2**16
WAYS = 16
# Key, digest and size of a block, and the time of its last use in seconds.
ENTRY = np.dtype([("key", "V16"), ("digest", "<u8"), ("size", "<i8"), ("used", "<f8")])
USED = ENTRY.itemsize - 8  # offset of the time in an entry
SET_BYTES = WAYS * (ENTRY.itemsize + REMOTE_BLOCK)


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


class BlockCache:
    """A set-associative cache of blocks by keys of 16 bytes, in a file of at most `limit` bytes.

    The file has entries [S, WAYS] of ENTRY, then blocks [S, WAYS] of REMOTE_BLOCK bytes. It is
    sparse, so it only takes the space of the blocks that were written. `limit` is SET_BYTES or
    more. The key determines the set; if the set is full, the least recently used block is replaced.

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
            if 0 < size <= REMOTE_BLOCK:
                data = os.pread(self._file.fileno(), size, self._block_at(number, way))
            if data and xxhash.xxh3_64_intdigest(data) == entry["digest"]:
                with suppress(OSError):
                    at = self._entry_at(number, way) + USED
                    os.pwrite(self._file.fileno(), np.float64(time.time()).tobytes(), at)
                return data
        return None

    def put(self, key: bytes, data: bytes) -> None:
        """Store a block of at most REMOTE_BLOCK bytes; a full disk is ignored."""
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
        return start + (number * WAYS + way) * REMOTE_BLOCK


class RemoteFiles:
    """The remote files of one corpus, read through a cache of blocks.

    - `sizes`: size in bytes by URL
    - `corpus`: identifies the files' contents in the keys of cached blocks
    """

    def __init__(self, sizes: Mapping[str, int], corpus: str, cache: BlockCache | None) -> None:
        self._sizes, self._corpus, self._cache = sizes, corpus, cache

    def read(self, ranges: Sequence[Range]) -> list[bytes]:
        """Return the bytes of each range; missing blocks are fetched together. See read_ranges."""
        numbers_of = [range(r.start // REMOTE_BLOCK, -(-r.end // REMOTE_BLOCK)) for r in ranges]
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
            first = numbers.start * REMOTE_BLOCK
            contents.append(joined[r.start - first : r.end - first])
        return contents

    def _block(self, url: str, number: int) -> Range:
        return Range(url, number * REMOTE_BLOCK, min((number + 1) * REMOTE_BLOCK, self._sizes[url]))

    def _key(self, block: Range) -> bytes:
        name = f"{self._corpus}\n{block.path}\n{block.start // REMOTE_BLOCK}"
        return blake2b(name.encode(), digest_size=16).digest()


@dataclass(frozen=True, eq=False)
class TokenFile:
    """A file of `num_tokens` ids."""

    path: str
    name: str
    """The file's name in messages."""
    dtype: np.dtype
    offset: int
    """The byte at which the ids begin."""
    num_tokens: int
    size: int
    """The file's size in bytes."""
    starts: np.ndarray | None = None
    """int64 [documents]: each document's first id; None if only end-of-text separates them."""
    lengths: np.ndarray | None = None
    """int64 [documents]: ids of each document, with its end-of-text if the file has one."""


def num_bytes(path: str) -> int:
    """Return a file's size in bytes; raise DataError if it is unreadable or empty."""
    if is_url(path):
        if (size := size_of(path)) is None:
            raise DataError(f"{path} is not a file; use the URL of a file, or remove it")
    else:
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise unreadable(path, error) from error
    if not size:
        raise DataError(f"{path} is empty (0 bytes); write it again, or remove it from data.paths")
    return size


def is_file(path: str) -> bool:
    """True if a file with this path or URL exists."""
    return size_of(path) is not None if is_url(path) else os.path.isfile(path)


def open_head(path: str) -> BinaryIO:
    """Open a file by its path or URL, to read its first bytes."""
    return open_url(path) if is_url(path) else open(path, "rb")


def column(path: str, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
    """Return `count` numbers from byte `offset` on, memory-mapped or read from a remote file."""
    if not count:
        return np.empty(0, dtype)
    if is_url(path):
        [data] = read_ranges([Range(path, offset, offset + count * dtype.itemsize)])
        return np.frombuffer(data, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r", offset=offset, shape=(count,)))


def open_ids(path: str, name: str) -> BinaryIO:
    """Open a file for `read_ids`; raise DataError if it is unreadable."""
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise unreadable(name, error) from error


def unreadable(path: str, error: OSError) -> DataError:
    """Return the DataError for an OSError while opening or reading a file."""
    reason = error.strerror or error
    return DataError(f"{path} cannot be read ({reason}); make it readable, or leave it out")


def wrong_size(path: str, size: int, expected: int) -> DataError:
    """Return the error for a file whose size differs from its header's."""
    return DataError(
        f"{path} has {size:,} bytes, but must have {expected:,} according to its header; it is"
        " truncated or damaged. Copy it again"
    )


def flat(path: str, dtype: np.dtype) -> TokenFile:
    """Return a file that consists of ids of `dtype` without a header."""
    size = num_bytes(path)
    num_tokens, rest = divmod(size, dtype.itemsize)
    if num_tokens < 1 or rest:
        raise DataError(
            f"{path} has {size:,} bytes, not a multiple of {dtype.name}; it is truncated, or"
            " data.token_dtype must be set to its type"
        )
    return TokenFile(path=path, name=path, dtype=dtype, offset=0, num_tokens=num_tokens, size=size)


def read_ids(file: BinaryIO, name: str, *, dtype: np.dtype, start: int, count: int) -> np.ndarray:
    """Return `count` ids from byte `start` of an open file on. Thread-safe.

    Raises DataError if the file is shorter.
    """
    ids = np.empty(count, dtype)
    view = ids.view(np.uint8).data
    done = 0
    while done < len(view):
        try:
            got = os.preadv(file.fileno(), [view[done : done + 2**30]], start + done)
        except OSError as error:
            raise unreadable(name, error) from error
        if not got:
            raise DataError(
                f"{name} has {os.fstat(file.fileno()).st_size:,} bytes, but its documents extend to"
                f" byte {start + len(view):,}; it shrank since it was prepared. Write it again"
            )
        done += got
    return ids


def blocks(file: TokenFile, start: int = 0, count: int | None = None) -> Iterator[np.ndarray]:
    """Yield `count` ids of a file (None: all) from the `start`-th on, in blocks of BLOCK."""
    end = file.num_tokens if count is None else start + count
    with nullcontext() if is_url(file.path) else open_ids(file.path, file.name) as local:
        for first in range(start, end, BLOCK):
            at, some = file.offset + first * file.dtype.itemsize, min(BLOCK, end - first)
            if local:
                yield read_ids(local, file.name, dtype=file.dtype, start=at, count=some)
            else:
                yield column(file.path, file.dtype, at, some)
