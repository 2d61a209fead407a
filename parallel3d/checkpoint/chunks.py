"""Read boxes of arrays from files, and the safetensors files of a checkpoint, a tensor per chunk.

A chunk is a box of a parameter's fp32 master weight or of a state that the optimizer keeps for it,
in the coordinates of the whole parameter. Its key is `name|kind|offset,offset,...`; its shape is
the shape of the stored tensor.
"""

import json
import os
import re
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain, product
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from parallel3d.base.errors import CheckpointError
from parallel3d.base.reader import JsonObject
from parallel3d.checkpoint.safe_files import is_count, open_file, parse_object


class Box(NamedTuple):
    """A rectangular part of a tensor: its first element's index and its extent, dim by dim."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements in the box; 1 for a scalar."""
        return prod(self.shape)

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return the elements of a tensor that are in the box, as a view."""
        for dim, (first, size) in enumerate(zip(self.offsets, self.shape, strict=True)):
            tensor = tensor.narrow(dim, first, size)
        return tensor


def boxes_of(shape: Sequence[int], start: int, stop: int) -> list[tuple[Box, int]]:
    """Return the contiguous boxes that tile the flat range [start, stop) of a tensor, in order.

    Each comes with the index of its first element, counted from `start`. A tensor of n dims needs
    at most 2n - 1 boxes: per dim, the rest of a row, full rows, and the beginning of a row.
    """
    assert 0 <= start <= stop <= prod(shape), f"[{start}, {stop}) is not in a tensor of {shape}"
    boxes = _boxes(tuple(shape), start, stop)
    firsts = accumulate((box.numel for box in boxes), initial=0)
    return list(zip(boxes, firsts, strict=False))


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    row = shape[1:]
    size = prod(row)
    first, begin = divmod(start, size)  # the range skips `begin` elements of the first row
    last, end = divmod(stop, size)  # the range has `end` elements of the last row
    if first == last:
        return _in_row(first, _boxes(row, begin, end))
    boxes: list[Box] = []
    if begin:
        boxes = _in_row(first, _boxes(row, begin, size))
        first += 1
    if first < last:
        boxes.append(Box((first, *[0] * len(row)), (last - first, *row)))
    return boxes + _in_row(last, _boxes(row, 0, end))


def _in_row(row: int, boxes: list[Box]) -> list[Box]:
    return [Box((row, *box.offsets), (1, *box.shape)) for box in boxes]


def shift(box: Box, offsets: Sequence[int]) -> Box:
    """Return the box moved by `offsets`, for example from a part's to the tensor's coordinates."""
    return Box(tuple(x + y for x, y in zip(box.offsets, offsets, strict=True)), box.shape)


def tile(boxes: Iterable[Box], shape: Sequence[int]) -> bool:
    """Return True if each element of a tensor is in exactly one of the boxes, and nothing else is.

    Counts the corners of each box with alternating signs: those of boxes that tile the tensor add
    up to the tensor's own corners, and only theirs.
    """
    corners = Counter[tuple[int, ...]]()
    whole = Box((0,) * len(shape), tuple(shape))
    signed = chain(((box, 1) for box in boxes), [(whole, -1)])
    for box, sign in signed:
        if len(box.shape) != len(shape):
            return False
        for ends in product((0, 1), repeat=len(shape)):
            corner = tuple(map(lambda at, size, end: at + size * end, *box, ends))
            corners[corner] += sign * (-1) ** sum(ends)
    return not any(corners.values())


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
    before = _recycled
    _recycled = _recycled or _Blocks()
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

        - `at`: the byte at which the array begins.
        - `shape`, `dtype`: those of the array.
        - `offsets`: where the box begins in the array, by dim.
        - `out`: [*box shape], of any type, strides and device. It is filled directly if it is
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
        gap = row_bytes - item * prod(out.shape[1:])
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
        memory = memory_of(out)
        done = 0
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


MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library

_ITEM = 4  # bytes of an fp32 number
_MAX_DIMS = 16
_OFFSET = r"(?:0|[1-9]\d{0,17})"
_KEY = re.compile(rf"(.+)\|(\w+)\|((?:{_OFFSET}(?:,{_OFFSET})*)?)", re.ASCII | re.DOTALL)


class Chunk(NamedTuple):
    """A box of a parameter's `kind`, in the coordinates of the whole parameter.

    `kind` is "master" or a state of the optimizer, as in `parallel3d.model.optimizers.kinds`.
    """

    name: str
    kind: str
    box: Box

    @property
    def key(self) -> str:
        """Name of the chunk in a safetensors file."""
        return f"{self.name}|{self.kind}|{','.join(map(str, self.box.offsets))}"

    @classmethod
    def from_key(cls, key: str, shape: Sequence[int]) -> "Chunk":
        """Return the chunk for a key and the shape of its tensor; raises ValueError."""
        match = _KEY.fullmatch(key)
        offsets = tuple(int(x) for x in match[3].split(",") if x) if match else ()
        if match and len(offsets) == len(shape):
            return cls(match[1], match[2], Box(offsets, tuple(shape)))
        raise ValueError(f"key {_short(key)} is not name|kind|offsets with {len(shape)} offsets")


def header(chunks: Sequence[Chunk]) -> bytes:
    """Return the header of a safetensors file of these chunks, whose bytes follow in this order."""
    tensors: dict[str, JsonObject] = {}
    at = 0
    for chunk in chunks:
        end = at + _ITEM * chunk.box.numel
        tensors[chunk.key] = {"dtype": "F32", "shape": chunk.box.shape, "data_offsets": (at, end)}
        at = end
    assert len(tensors) == len(chunks), "a chunk occurs twice"
    return header_bytes(tensors)


def header_bytes(tensors: Mapping[str, object]) -> bytes:
    """Return the bytes of a safetensors header with these entries.

    They are the JSON's length (8 bytes, little-endian) and the JSON, padded to a multiple of 8.

    - `tensors`: {name: {"dtype": ..., "shape": ..., "data_offsets": ...}}.
    """
    text = json.dumps(tensors, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-len(text) % 8)
    assert len(text) <= MAX_HEADER_BYTES, f"a header of {len(text):,} bytes cannot be read"
    return len(text).to_bytes(8, "little") + text


class ChunkFile(ArrayFile):
    """A safetensors file of chunks, open for reading. `chunks` maps each to its first byte."""

    def __init__(self, path: Path, chunks: Mapping[Chunk, int] | None = None) -> None:
        """Open the file and check its header, unless the caller passes `chunks`.

        Raises CheckpointError if it is not a safetensors file of chunks.
        """
        super().__init__(path)
        try:
            self.chunks = _parse(self) if chunks is None else chunks
        except (OSError, ValueError) as error:
            self.close()
            what = "not a safetensors file of chunks"
            if isinstance(error, OSError):
                what = "cannot be read"
            raise CheckpointError(f"{path}: {what}: {error}; use another checkpoint") from None

    def read(self, chunk: Chunk, box: Box, out: Tensor) -> None:
        """Fill `out` with a box of the chunk; raises CheckpointError.

        - `box`: in the coordinates of the whole parameter, inside the chunk.
        - `out`: fp32 [*box.shape], of any strides and on any device.
        """
        assert out.dtype == torch.float32 and tuple(out.shape) == box.shape, f"{out.shape} {box}"
        offsets = tuple(map(int.__sub__, box.offsets, chunk.box.offsets))
        self.read_box(self.chunks[chunk], chunk.box.shape, offsets, out, torch.float32)


def read_header(file: ArrayFile) -> tuple[dict[str, Any], int]:
    """Return the entries of a safetensors header by name, and the byte at which the data begins.

    The entries are not checked. Raises ValueError, OSError.
    """
    start = os.pread(file.descriptor, 8, 0)
    if len(start) < 8:
        raise ValueError(f"it is {file.size} bytes, too short for a safetensors file")
    length = int.from_bytes(start, "little")
    if length > min(file.size - 8, MAX_HEADER_BYTES):
        raise ValueError(f"its header claims {length:,} of the file's {file.size:,} bytes")
    tensors = parse_object(os.pread(file.descriptor, length, 8))
    tensors.pop("__metadata__", None)
    return tensors, 8 + length


def _parse(file: ArrayFile) -> dict[Chunk, int]:
    """Return a file's chunks, each with its first byte; raises ValueError, OSError."""
    tensors, begin = read_header(file)
    at = 0
    chunks: dict[Chunk, int] = {}
    for chunk, (first, end) in sorted(_tensors(tensors), key=lambda pair: pair[1]):
        if first != at:
            raise ValueError(f"{_short(chunk.key)} begins at byte {first}, not {at}")
        chunks[chunk] = begin + first
        at = end
    if begin + at != file.size:
        raise ValueError(
            f"its header describes {begin + at:,} bytes, but the file has {file.size:,}"
        )
    return chunks


def _tensors(tensors: JsonObject) -> list[tuple[Chunk, tuple[int, int]]]:
    """Return a header's chunks with their data offsets; raises ValueError if numbers do not fit."""
    chunks = []
    for key, entry in tensors.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"{_short(key)} must have dtype, shape and data_offsets only")
        shape = entry["shape"]
        offsets = entry["data_offsets"]
        if entry["dtype"] != "F32":
            raise ValueError(f"{_short(key)} is {_short(entry['dtype'])}, not F32")
        if not _counts(shape) or len(shape) > _MAX_DIMS or 0 in shape:
            raise ValueError(f"{_short(key)} has the invalid shape {_short(shape)}")
        if not _counts(offsets) or len(offsets) != 2:
            raise ValueError(f"{_short(key)} has the invalid data_offsets {_short(offsets)}")
        if offsets[1] - offsets[0] != _ITEM * prod(shape):
            raise ValueError(
                f"{_short(key)} of shape {shape} needs {_ITEM * prod(shape)} bytes, but has bytes "
                f"[{offsets[0]}, {offsets[1]})"
            )
        chunks.append((Chunk.from_key(key, shape), (offsets[0], offsets[1])))
    return chunks


def _counts(values: object) -> bool:
    return isinstance(values, list) and all(map(is_count, values))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]}...'"
