"""Read boxes of row-major arrays from a file directly into tensors."""

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
# Up to about this size, reading a gap is cheaper than one more system call.
GAP_BYTES = 64 * 2**10
# Rows transposed at once, so that their pages and lines fit the TLB and the data cache.
TRANSPOSED_ROWS = 512
PAGE_BYTES = 4096

Dims = tuple[int, ...]


def memory_of(value: Tensor) -> memoryview:
    """Return the bytes of a contiguous host tensor, without a copy."""
    # Not view(-1): a contiguous tensor of one element may have any stride.
    flat = value.detach().as_strided((value.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized host tensor."""
    # Not torch.empty: in deterministic mode torch fills it, and numpy requests huge pages, which
    # halves the cost of new memory.
    size = dtype.itemsize * prod(shape)
    memory = np.empty(size, "u1") if _recycled is None else _recycled.take(size)
    return torch.from_numpy(memory).view(dtype).view(tuple(shape))


class _Blocks:
    """Unused blocks of memory, never more than were in use at once."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        self._lock = Lock()

    def take(self, size: int) -> np.ndarray:
        """Return an array of `size` bytes, whose block is freed when nothing refers to it."""
        with self._lock:
            fitting = [block for block in self._free if len(block) >= size]
            if self._free:  # if none fits, the smallest block is replaced by a larger one
                used = min(fitting or self._free, key=len)
                del self._free[next(n for n, block in enumerate(self._free) if block is used)]
        block = min(fitting, key=len) if fitting else np.empty(size, "u1")
        array = block[:size]
        # No lock: the finalizer can run at any time in any thread, and append is atomic.
        weakref.finalize(array, self._free.append, block).atexit = False
        return array


_recycled: _Blocks | None = None


@contextmanager
def recycled() -> Iterator[None]:
    """Let `empty` reuse the memory of its freed tensors, in all threads.

    The system clears new memory, which takes as long as reading the same bytes from a file.
    """
    global _recycled
    before, _recycled = _recycled, _recycled or _Blocks()
    try:
        yield
    finally:
        _recycled = before


class ArrayFile:
    """A file of arrays, open for reading. The caller knows where each array begins."""

    def __init__(self, path: Path) -> None:
        """Open the file; raises CheckpointError if it cannot be opened or is not a plain file."""
        self.path = path
        try:
            self.descriptor, self.size = open_file(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror or error}") from None

    def read_box(
        self, at: int, shape: Dims, offsets: Dims, out: Tensor, dtype: torch.dtype
    ) -> None:
        """Fill `out` with a box of an array; raises CheckpointError if it cannot be read.

        Args:
            at: the byte at which the array begins.
            shape, dtype: of the array.
            offsets: where the box begins in the array, by dim.
            out: [*box shape], of any type, strides and device. It is filled directly if it is
                contiguous host memory of the array's type, otherwise through buffers of 8 MiB.
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
        transposed = out.dim() > 1 and out.stride(0) == 1 < out.stride(-1)
        if transposed:
            rows_at_once = min(rows_at_once, TRANSPOSED_ROWS)
        for first in range(0, len(out), rows_at_once):
            part = out[first : first + rows_at_once]
            rows = staging[: len(part) * row_bytes // item].view(len(part), *shape[1:])
            self._fill(rows, at + first * row_bytes)
            for dim, offset in enumerate(offsets[1:], start=1):
                rows = rows.narrow(dim, offset, part.shape[dim])
            if transposed and row_bytes % PAGE_BYTES == 0 and part.device.type == "cpu":
                # Elements of a column share few cache lines; torch transposes in blocks.
                columns = rows.contiguous().flatten(1).t().contiguous()
                rows = columns.t().unflatten(1, part.shape[1:])
            part.copy_(rows)

    def _fill(self, out: Tensor, at: int) -> None:
        """Fill a contiguous host tensor from byte `at` on."""
        memory, done = memory_of(out), 0
        while done < len(memory):  # one call reads at most 2 GiB
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
        """Close the file; may be called twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
