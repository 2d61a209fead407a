"""A checkpoint's safetensors files, with one tensor per chunk.

A chunk is a box of a parameter's fp32 master weight or of a state that the optimizer keeps for it,
in the coordinates of the whole parameter. Its key is `name|kind|offset,offset,...`; its shape is
the shape of the stored tensor.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel3d.base.errors import CheckpointError
from parallel3d.checkpoint.arrays import ArrayFile
from parallel3d.checkpoint.box import Box, inside
from parallel3d.checkpoint.safe_files import is_count, parse_object

Dims = tuple[int, ...]

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library

_ITEM = 4  # bytes of an fp32 number
_MAX_DIMS = 16
_KEY = re.compile(r"(.+)\|(\w+)\|((?:\d{1,18}(?:,\d{1,18})*)?)", re.ASCII | re.DOTALL)


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
            chunk = cls(match[1], match[2], Box(offsets, tuple(shape)))
            if chunk.key == key:  # no leading zeros
                return chunk
        raise ValueError(f"key {_short(key)} is not name|kind|offsets with {len(shape)} offsets")


def header(chunks: Sequence[Chunk]) -> bytes:
    """Return the header of a safetensors file of these chunks, whose bytes follow in this order."""
    tensors: dict[str, dict[str, object]] = {}
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

    Args:
        tensors: {name: {"dtype": ..., "shape": ..., "data_offsets": ...}}.
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
            raise CheckpointError(
                f"{path}: not a safetensors file of chunks: {error}; use another checkpoint"
            ) from None

    def read(self, chunk: Chunk, box: Box, out: Tensor) -> None:
        """Fill `out` with a box of the chunk; raises CheckpointError.

        Args:
            box: in the coordinates of the whole parameter.
            out: fp32 [*box.shape], of any strides and on any device.
        """
        assert inside(box, chunk.box), f"{box} is not inside {chunk}"
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
        pickle = start[:1] == b"\x80" or start[:4] == b"PK\3\4"
        hint = "; it looks like a pickle, which is never read" if pickle else ""
        raise ValueError(f"its header claims {length:,} of the file's {file.size:,} bytes{hint}")
    try:
        tensors = parse_object(os.pread(file.descriptor, length, 8))
    except ValueError as error:
        raise ValueError(f"its header is not valid JSON: {error}") from None
    tensors.pop("__metadata__", None)
    return tensors, 8 + length


def _parse(file: ArrayFile) -> dict[Chunk, int]:
    """Return a file's chunks, each with its first byte; raises ValueError, OSError."""
    tensors, begin = read_header(file)
    at = 0
    chunks: dict[Chunk, int] = {}
    for chunk, (first, end) in sorted(_tensors(tensors), key=lambda pair: pair[1]):
        if first != at:
            fault = "overlaps the one before it" if first < at else "leaves a gap before it"
            raise ValueError(f"{_short(chunk.key)} at bytes [{first}, {end}) {fault}")
        chunks[chunk] = begin + first
        at = end
    if begin + at != file.size:
        raise ValueError(
            f"its header describes {begin + at:,} bytes, but the file has {file.size:,}"
        )
    return chunks


def _tensors(tensors: dict[str, object]) -> list[tuple[Chunk, tuple[int, int]]]:
    """Return a header's chunks with their data offsets; raises ValueError if numbers do not fit."""
    chunks = []
    for key, entry in tensors.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"{_short(key)} must have dtype, shape and data_offsets only")
        shape, offsets = entry["shape"], entry["data_offsets"]
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
