"""A file of token ids: the positions of its documents, and reading its ids."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from parallel3d.base.errors import DataError

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
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise unreadable(path, error) from error
    if not size:
        raise DataError(f"{path} is empty (0 bytes); write it again, or remove it from data.paths")
    return size


def unreadable(path: str, error: OSError) -> DataError:
    """Return the error for a file that cannot be opened or read."""
    return DataError(
        f"{path} cannot be read ({error.strerror or error}); make it readable, or leave it out"
    )


def column(path: str, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
    """Return `count` numbers from byte `offset` on, memory-mapped."""
    if not count:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r", offset=offset, shape=(count,)))


def spread(count: int, most: int) -> np.ndarray:
    """Return at most `most` of the indices 0 .. count - 1, evenly spread: int64 [n]."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


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


def blocks(file: TokenFile, start: int = 0, count: int | None = None) -> Iterator[np.ndarray]:
    """Yield `count` ids of a file (None: all) from the `start`-th on, in blocks of BLOCK."""
    end = file.num_tokens if count is None else start + count
    for first in range(start, end, BLOCK):
        place = file.offset + first * file.dtype.itemsize
        yield np.fromfile(file.path, file.dtype, min(BLOCK, end - first), offset=place)
