"""Stamps of tensors: what is compared in place of two tensors that were never in memory at once."""

from typing import NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from parallel3d.checkpoint.arrays import memory_of


class Stamp(NamedTuple):
    """The type and the shape of a tensor, and the 128-bit hash of its bytes.

    Of a NaN and of -0, too: stamps are equal where the bits are.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    digest: str


def stamp(value: Tensor) -> Stamp:
    """The stamp of a contiguous tensor of the host."""
    return Stamp(value.dtype, tuple(value.shape), xxh3_128_hexdigest(memory_of(value)))
