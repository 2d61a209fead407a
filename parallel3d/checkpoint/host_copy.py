"""A copy of a rank's training state in host memory, from which a checkpoint is written."""

from collections.abc import Iterable
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

SMALLEST = 2**18  # elements of the smallest piece but the last: 1 MiB


def piece_sizes(numel: int) -> list[int]:
    """Powers of two, the largest first, that add up to `numel` and less than SMALLEST more.

    Page-locked memory is given in powers of two of bytes: one buffer of 33 GiB would take 64.
    """
    sizes = [1 << bit for bit in reversed(range(numel.bit_length())) if numel >> bit & 1]
    whole = [size for size in sizes if size >= SMALLEST]
    rest = numel - sum(whole)
    return [*whole, 1 << (rest - 1).bit_length()] if rest else whole


def copy_bytes(numel: int) -> int:
    """Bytes of host memory that a copy of `numel` fp32 elements takes."""
    return 4 * sum(piece_sizes(numel))


class HostCopy:
    """Host memory for `numel` fp32 elements, page-locked if `pinned`.

    The last piece may have more elements than are used.
    """

    def __init__(self, numel: int, pinned: bool) -> None:
        self._pieces = [torch.empty(size, pin_memory=pinned) for size in piece_sizes(numel)]
        self._numel, self._pinned = numel, pinned

    def fill(self, tensors: Iterable[Tensor]) -> None:
        """Copy flat fp32 tensors, `numel` elements in all, one after the other; waits for them."""
        pieces = iter(self._pieces)
        space = torch.empty(0)
        for tensor in tensors:
            while len(tensor):
                space = space if len(space) else next(pieces)
                count = min(len(space), len(tensor))
                space[:count].copy_(tensor[:count], non_blocking=True)
                space, tensor = space[count:], tensor[count:]
        if self._pinned:
            torch.accelerator.synchronize()

    def arrays(self) -> list[np.ndarray]:
        """The elements, in their order."""
        starts = accumulate((len(piece) for piece in self._pieces), initial=0)
        return [
            piece[: self._numel - start].numpy()
            for piece, start in zip(self._pieces, starts, strict=False)
        ]
