"""The chunks of the training state that each rank writes, and where they lie in its memory.

A copy of them in host memory is what a checkpoint is written from while training goes on.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np
import torch
from torch import Tensor

from parallel3d.checkpoint.box import Box, boxes_of, shift
from parallel3d.checkpoint.chunks import Chunk
from parallel3d.engine import KINDS, Engine, HeldParameter, ParameterPiece
from parallel3d.mesh.mesh import Mesh
from parallel3d.tensor.cut import even_split

SMALLEST = 2**18  # elements of the smallest piece of a copy but the last: 1 MiB


@dataclass(frozen=True)
class ChunkRun:
    """Chunks that follow each other in one flat tensor: [start, stop) of a piece's `kind`."""

    block: int
    piece: int
    kind: str
    start: int
    stop: int
    chunks: tuple[Chunk, ...]


def boxes_in_whole(held: HeldParameter, start: int, stop: int) -> list[tuple[Box, int]]:
    """The boxes of a whole parameter that elements [start, stop) of a rank's part fill.

    As `boxes_of` gives them.
    """
    cut = held.cut
    first = [0] * len(cut.global_shape)
    if cut.dim is not None:
        first[cut.dim] = cut.start
    boxes = boxes_of(cut.local_shape, start, stop)
    return [(shift(box, tuple(first)), at) for box, at in boxes]


def runs_to_write(engine: Engine, mesh: Mesh) -> list[ChunkRun]:
    """The runs of chunks that this rank writes; all ranks together write each element once.

    Tensor parallelism's first rank writes what that does not cut; replicas write even shares.
    """
    runs = []
    for number, block in enumerate(engine.states.blocks):
        for index, piece in enumerate(block):
            if not piece.held.counts:
                continue
            start, stop = _share(engine, mesh, piece)
            if stop > start:
                at = piece.start
                boxes = [b for b, _ in boxes_in_whole(piece.held, at + start, at + stop)]
                for kind in KINDS:
                    chunks = tuple(Chunk(piece.held.name, kind, box) for box in boxes)
                    runs.append(ChunkRun(number, index, kind, start, stop, chunks))
    return runs


def _share(engine: Engine, mesh: Mesh, piece: ParameterPiece) -> tuple[int, int]:
    if engine.settings.shard_axis == "dp":
        return 0, piece.numel
    return even_split(piece.numel, mesh.size("dp"), mesh.coord("dp"))


def live_tensors(engine: Engine, runs: Sequence[ChunkRun]) -> Iterator[Tensor]:
    """The elements of each run where they live, one run after the other; NVMe is read for it."""
    for number, group in groupby(runs, key=lambda run: run.block):
        with engine.states.opened(number) as tensors:
            for run in group:
                yield tensors[run.piece][run.kind][run.start : run.stop]


def host_arrays(engine: Engine, runs: Sequence[ChunkRun]) -> Generator[np.ndarray]:
    """The elements of each run in host memory: copied from a device, in place on the host."""
    for tensor in live_tensors(engine, runs):
        yield tensor.detach().cpu().numpy()


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
