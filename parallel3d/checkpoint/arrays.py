"""Direct reads of boxes of row-major arrays in a file into tensors."""

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from threading import Lock
from typing import Self

import numpy as np
import torch
from torch import Tensor

from parallel3d.base.errors import CheckpointError
from parallel3d.checkpoint.safe_files import open_file

STAGING_BYTES = 8 * 2**20
# Reading over a gap is cheaper than one more call to the system, up to about here.
GAP_BYTES = 64 * 2**10
# Rows transposed at once: their pages and lines fit the caches of addresses and of data.
TURNED_ROWS = 512
PAGE_BYTES = 4096

Dims = tuple[int, ...]


def memory_of(value: Tensor) -> memoryview:
    """The bytes of a contiguous tensor of the host, in place."""
    # Not view(-1): a contiguous tensor of one element may have any stride.
    flat = value.detach().as_strided((value.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A new tensor of the host, of any values."""
    # Not torch.empty: deterministic torch fills it, and numpy asks for large pages, which halves
    # the cost of memory that is new.
    size = dtype.itemsize * prod(shape)
    memory = np.empty(size, "u1") if _recycled is None else _recycled.take(size)
    return torch.from_numpy(memory).view(dtype).view(tuple(shape))


class _Blocks:
    """Blocks of memory that nothing uses: never more of them than were in use at once."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        self._lock = Lock()

    def take(self, size: int) -> np.ndarray:
        """An array of so many bytes, whose block is free again when nothing refers to it."""
        with self._lock:
            fit = [block for block in self._free if len(block) >= size]
            if self._free:  # of those that are too small one makes room for a larger one
                old = min(fit or self._free, key=len)
                del self._free[next(n for n, block in enumerate(self._free) if block is old)]
        block = min(fit, key=len) if fit else np.empty(size, "u1")
        found = block[:size]
        # Without the lock: it may run wherever an object goes, and to append is one step.
        weakref.finalize(found, self._free.append, block).atexit = False
        return found


_recycled: _Blocks | None = None


@contextmanager
def recycled() -> Iterator[None]:
    """Have `empty` reuse the memory of its tensors that are gone, in all threads.

    The system clears new memory, which takes as long as to read as much from a file.
    """
    global _recycled
    before, _recycled = _recycled, _recycled or _Blocks()
    try:
        yield
    finally:
        _recycled = before


class ArrayFile:
    """A file of arrays open for reading; the caller knows where each array begins."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError where the file cannot be opened, or is no plain file."""
        self.path = path
        try:
            self.descriptor, self.size = open_file(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror or error}") from None

    def read_box(
        self, at: int, shape: Dims, offsets: Dims, out: Tensor, dtype: torch.dtype
    ) -> None:
        """Fill `out` with the box at `offsets` of an array [*shape] of `dtype` stored from `at`.

        out: of any type, strides and device; where it is contiguous as in the file it is read into
        directly, else through a buffer or two of at most 8 MiB. Raises CheckpointError.
        """
        staging = empty([min(STAGING_BYTES // dtype.itemsize, prod(shape))], dtype)
        self._read(at, shape, offsets, out.detach(), staging)

    def _read(self, at: int, shape: Dims, offsets: Dims, out: Tensor, staging: Tensor) -> None:
        if out.numel() == 0:
            return
        item = staging.element_size()
        whole_rows = tuple(out.shape[1:]) == shape[1:]
        row_bytes = item * prod(shape[1:])
        at += offsets[0] * row_bytes if shape else 0
        direct = out.device.type == "cpu" and out.is_contiguous() and out.dtype == staging.dtype
        if whole_rows and direct:
            self._fill(out, at)
            return
        if not shape:
            self._fill(staging[:1], at)
            out.copy_(staging[0])
            return
        gap = 0 if whole_rows else row_bytes - item * out[0].numel()
        rows_at_once = item * len(staging) // row_bytes
        if len(shape) > 1 and (len(out) == 1 or gap > GAP_BYTES or rows_at_once == 0):
            for row, part in enumerate(out):
                self._read(at + row * row_bytes, shape[1:], offsets[1:], part, staging)
            return
        turned = out.dim() > 1 and out.stride(0) == 1 < out.stride(-1)
        if turned:
            rows_at_once = min(rows_at_once, TURNED_ROWS)
        for first in range(0, len(out), rows_at_once):
            part = out[first : first + rows_at_once]
            rows = staging[: len(part) * row_bytes // item].view(len(part), *shape[1:])
            self._fill(rows, at + first * row_bytes)
            for dim, offset in enumerate(offsets[1:], start=1):
                rows = rows.narrow(dim, offset, part.shape[dim])
            if turned and row_bytes % PAGE_BYTES == 0 and part.device.type == "cpu":
                # A column's elements would share few lines of the cache: torch turns it in blocks.
                columns = rows.contiguous().flatten(1).t().contiguous()
                rows = columns.t().unflatten(1, part.shape[1:])
            part.copy_(rows)

    def _fill(self, out: Tensor, at: int) -> None:
        """Read a contiguous tensor of the host from where its bytes begin."""
        memory, done = memory_of(out), 0
        while done < len(memory):  # one call gives 2 GiB at most
            try:
                count = os.preadv(self.descriptor, [memory[done:]], at + done)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from None
            if count == 0:
                raise CheckpointError(
                    f"{self.path}: ends at byte {at + done:,}, "
                    f"{len(memory) - done:,} bytes too early; use another checkpoint"
                )
            done += count

    def close(self) -> None:
        """Close the file; twice does no harm."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
