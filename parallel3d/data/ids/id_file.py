"""A file of token ids: where its documents are, and how its ids are read."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from parallel3d.base.errors import DataError
from parallel3d.data.ids.remote import Range, is_url, open_url, read_ranges, size_of

# Types of ids, by the name that configs and messages give it.
INTEGERS = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
}
# Types of the numbers beside ids.
NUMBERS = INTEGERS | {
    name: np.dtype(short).newbyteorder("<")
    for name, short in (("halffloat", "f2"), ("float", "f4"), ("double", "f8"))
}
NUMBERS |= {dtype.name: dtype for dtype in NUMBERS.values()}
# Ids that are read at a time: 16 MB as uint32.
BLOCK = 2**22


@dataclass(frozen=True, eq=False)
class TokenFile:
    """One file of `num_tokens` ids of `dtype`, which begin at the byte `offset`.

    Document i is the `lengths[i]` ids from the `starts[i]`-th on, perhaps with an end-of-text; None
    where only an end-of-text ends each. `size` is in bytes; `name` is for messages.
    """

    path: str
    name: str
    dtype: np.dtype
    offset: int
    num_tokens: int
    size: int
    starts: np.ndarray | None = None
    lengths: np.ndarray | None = None


def num_bytes(path: str) -> int:
    """Return a file's size; raises DataError if it cannot be read, or is empty."""
    if is_url(path):
        if (size := size_of(path)) is None:
            raise DataError(f"{path} is no file; give the URL of one, or leave it out")
    else:
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise unreadable(path, error) from error
    if not size:
        raise DataError(f"{path} is empty (0 bytes); write it again, or leave it out of data.paths")
    return size


def is_file(path: str) -> bool:
    """True if there is a file of this path or URL."""
    return size_of(path) is not None if is_url(path) else os.path.isfile(path)


def open_head(path: str) -> BinaryIO:
    """Open a file by its path or URL, to read what stands at its beginning."""
    return open_url(path) if is_url(path) else open(path, "rb")


def column(path: str, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
    """`count` numbers from the byte `offset` on: memory-mapped, or read from a remote file."""
    if not count:
        return np.empty(0, dtype)
    if is_url(path):
        [data] = read_ranges([Range(path, offset, offset + count * dtype.itemsize)])
        return np.frombuffer(data, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r", offset=offset, shape=(count,)))


def open_ids(path: str, name: str) -> BinaryIO:
    """Open a file for `read_ids`; raises DataError where it cannot be read."""
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise unreadable(name, error) from error


def unreadable(path: str, error: OSError) -> DataError:
    """Return the error for a file that the system does not let us read."""
    reason = error.strerror or error
    return DataError(f"{path} cannot be read ({reason}); make it readable, or leave it out")


def cut_short(path: str, size: int, whole: int) -> DataError:
    """Return the error for a file whose size is not the one that its header says."""
    return DataError(
        f"{path} has {size:,} bytes, and {whole:,} by its header: it is cut short or damaged; copy"
        " it again"
    )


def flat(path: str, dtype: np.dtype) -> TokenFile:
    """Return the file that holds ids of `dtype` and nothing else."""
    size = num_bytes(path)
    num_tokens, rest = divmod(size, dtype.itemsize)
    if num_tokens < 1 or rest:
        raise DataError(
            f"{path} has {size:,} bytes, no whole number of {dtype.name}; it is cut"
            " short, or data.token_dtype is another one"
        )
    return TokenFile(path=path, name=path, dtype=dtype, offset=0, num_tokens=num_tokens, size=size)


def read_ids(file: BinaryIO, name: str, *, dtype: np.dtype, start: int, count: int) -> np.ndarray:
    """Return `count` ids from the byte `start` of an open file on; any thread may ask.

    Raises DataError where the file has fewer.
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
                f"{name} has {os.fstat(file.fileno()).st_size:,} bytes, and ids up to byte"
                f" {start + len(view):,} belong to its documents: it shrank since it was prepared;"
                " write it again"
            )
        done += got
    return ids


def blocks(file: TokenFile, start: int = 0, count: int | None = None) -> Iterator[np.ndarray]:
    """Yield `count` ids of a file (None: all), from the `start`-th on, a block at a time."""
    end = file.num_tokens if count is None else start + count
    size = file.dtype.itemsize
    if is_url(file.path):
        for first in range(start, end, BLOCK):
            last = min(first + BLOCK, end)
            yield column(file.path, file.dtype, file.offset + first * size, last - first)
        return
    with open_ids(file.path, file.name) as opened:
        for first in range(start, end, BLOCK):
            yield read_ids(
                opened,
                file.name,
                dtype=file.dtype,
                start=file.offset + first * size,
                count=min(BLOCK, end - first),
            )
