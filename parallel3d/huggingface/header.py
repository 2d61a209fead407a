"""The header of a safetensors file, read without trusting any number in it."""

import os
from math import prod
from typing import NamedTuple

import torch

from parallel3d.base.errors import CheckpointError
from parallel3d.checkpoint.arrays import ArrayFile
from parallel3d.checkpoint.chunks import MAX_HEADER_BYTES
from parallel3d.checkpoint.files import is_count, parse_object

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class StoredTensor(NamedTuple):
    """A tensor in a file: its name there, where its bytes begin, its shape, and its type.

    The type bears safetensors' name.
    """

    name: str
    file: ArrayFile
    at: int
    shape: tuple[int, ...]
    type: str


def read_header(file: ArrayFile) -> dict[str, StoredTensor]:
    """Read the tensors of a file by their names; raises CheckpointError for another file."""
    try:
        return _parse(file)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file.path}: is no sound file of safetensors ({error}); download it again"
        ) from None


def _parse(file: ArrayFile) -> dict[str, StoredTensor]:
    start = os.pread(file.descriptor, 8, 0)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(file.size - 8, MAX_HEADER_BYTES):
        raise ValueError(f"it has {file.size:,} bytes, which do not hold its header")
    entries = parse_object(os.pread(file.descriptor, length, 8))
    entries.pop("__metadata__", None)
    found: dict[str, StoredTensor] = {}
    size = file.size - 8 - length
    for name, entry in entries.items():
        shape, (first, end) = entry["shape"], entry["data_offsets"]
        if not all(map(is_count, [first, end, *shape])) or not first <= end <= size:
            raise ValueError(f"{name[:80]!r} is not within its {file.size:,} bytes")
        dtype = DTYPES.get(entry["dtype"])
        if dtype and end - first != dtype.itemsize * prod(shape):
            raise ValueError(f"{name[:80]!r} has {end - first:,} bytes for the shape {shape}")
        found[name] = StoredTensor(
            name, file, 8 + length + first, tuple(shape), str(entry["dtype"])
        )
    return found
