"""The chunks of the training state that each rank writes, and where they are in its memory.

An asynchronous save writes from a copy of them in host memory.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import prod

import numpy as np
import torch
from torch import Tensor

from parallel3d.checkpoint.chunks import Box, Chunk, boxes_of, shift
from parallel3d.engine import Engine, HeldParameter
from parallel3d.mesh.mesh import Mesh
from parallel3d.tensor.cut import even_split

SMALLEST = 2**18  # elements of a copy's smallest piece, except the last: 1 MiB


@dataclass(frozen=True)
class ChunkRun:
    """Consecutive chunks in one flat tensor: elements [start, stop) of a piece's `kind`.

    `block` and `piece` are the indices of the optimizer's block and of the piece in it.
    """

    block: int
    piece: int
    kind: str
    start: int
    stop: int
    chunks: tuple[Chunk, ...]


def global_boxes(held: HeldParameter, start: int, stop: int) -> list[tuple[Box, int]]:
    """Return the boxes, in the whole parameter, of elements [start, stop) of a rank's part.

    The list is that of `boxes_of`.
    """
    first = [start for start, _ in held.cut.bounds]
    boxes = boxes_of(held.cut.local_shape, start, stop)
    return [(shift(box, first), at) for box, at in boxes]


def runs_to_write(engine: Engine, copy: int | None = None) -> list[ChunkRun]:
    """Return the runs of chunks that this rank writes; together, ranks write each element once.

    - `copy`: those of the rank with that copy of this rank's shards, which has the same elements.

    Of tensor-parallel ranks with equal copies the first one writes; replicas, and the
    copies of a shard, write even shares.
    """
    runs = []
    for number, block in enumerate(engine.states.blocks):
        for index, piece in enumerate(block):
            if not piece.held.counts:
                continue
            # These ranks hold equal pieces.
            equal = engine.mesh.copies
            if engine.settings.zero.stage == 0:
                equal = piece.held.replicas
            coord = equal.coord if copy is None else copy
            start, stop = even_split(piece.numel, equal.size, coord)
            if stop > start:
                at = piece.start
                boxes = [b for b, _ in global_boxes(piece.held, at + start, at + stop)]
                for kind in engine.states.kinds_of(piece.held):
                    chunks = tuple(Chunk(piece.held.name, kind, box) for box in boxes)
                    runs.append(ChunkRun(number, index, kind, start, stop, chunks))
    return runs


def live_tensors(engine: Engine, runs: Sequence[ChunkRun]) -> Iterator[Tensor]:
    """Yield the elements of each run where they are, run by run; states on NVMe are read."""
    for number, group in groupby(runs, key=lambda run: run.block):
        with engine.states.opened(number) as tensors:
            for run in group:
                yield tensors[run.piece][run.kind][run.start : run.stop]


def host_arrays(engine: Engine, runs: Sequence[ChunkRun]) -> Generator[np.ndarray]:
    """Yield the elements of each run in host memory; only those on a device are copied."""
    for tensor in live_tensors(engine, runs):
        yield tensor.detach().cpu().numpy()


def piece_sizes(numel: int) -> list[int]:
    """Return powers of two, largest first, whose sum exceeds `numel` by less than SMALLEST.

    Page-locked memory is allocated in powers of two: one buffer of 33 GiB would take 64 GiB.
    """
    sizes = [1 << bit for bit in reversed(range(numel.bit_length())) if numel >> bit & 1]
    pieces = [size for size in sizes if size >= SMALLEST]
    rest = numel - sum(pieces)
    if rest:
        pieces.append(1 << (rest - 1).bit_length())
    return pieces


def copy_bytes(numel: int) -> int:
    """Return the bytes of host memory for a copy of `numel` fp32 elements."""
    return 4 * sum(piece_sizes(numel))


class HostCopy:
    """Host memory for `numel` fp32 elements, page-locked if `pinned`.

    The last piece may have more elements than are used.
    """

    def __init__(self, numel: int, pinned: bool) -> None:
        self._pieces = [torch.empty(size, pin_memory=pinned) for size in piece_sizes(numel)]
        self._numel = numel
        self._pinned = pinned

    def fill(self, tensors: Iterable[Tensor]) -> None:
        """Copy flat fp32 tensors, `numel` elements in all, and wait for the copies."""
        pieces = iter(self._pieces)
        space = torch.empty(0)
        for tensor in tensors:
            while len(tensor):
                space = space if len(space) else next(pieces)
                count = min(len(space), len(tensor))
                space[:count].copy_(tensor[:count], non_blocking=True)
                space = space[count:]
                tensor = tensor[count:]
        if self._pinned:
            torch.accelerator.synchronize()

    def arrays(self) -> list[np.ndarray]:
        """Return the elements, in order."""
        starts = accumulate((len(piece) for piece in self._pieces), initial=0)
        arrays = []
        for piece, start in zip(self._pieces, starts, strict=False):
            arrays.append(piece[: self._numel - start].numpy())
        return arrays


_AT_A_TIME = 2**22  # elements, whose indices and bits take 8 bytes each
_MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio, as a signed number


def bit_sum(values: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return the checksum of a box of a parameter's elements, an int64 [] on their device.

    It is the sum, modulo 2^64, of each element's 32 (or 16) bits times an odd number that depends
    on its index in the whole parameter. So the checksums of boxes add up to that of the parameter,
    and a flipped bit always changes it.

    - `values`: the box's elements.
    - `offsets`: the box's first index in each dim of the parameter.
    - `shape`: the parameter's shape.
    """
    if not values.dim():
        return _bit_sum(values, offsets, shape)
    rows = max(1, _AT_A_TIME // max(1, prod(values.shape[1:])))
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for first in range(0, len(values), rows):
        part = values[first : first + rows]
        starts = [offsets[0] + first, *offsets[1:]]
        total += _bit_sum(part, starts, shape)
    return total


def _bit_sum(values: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    index = torch.zeros((), dtype=torch.int64, device=values.device)
    for start, size, count in zip(offsets, shape, values.shape, strict=True):
        places = torch.arange(start, start + count, device=values.device)
        index = index.unsqueeze(-1) * size + places
    weights = index * _MULTIPLIER
    weights ^= weights >> 29
    integers = torch.int16 if values.element_size() == 2 else torch.int32
    bits = values.detach().view(integers)
    return (bits.to(torch.int64) * (weights | 1)).sum()


def state_checksums(
    engine: Engine, mesh: Mesh, shapes: Mapping[str, Sequence[int]]
) -> dict[str, list[int]]:
    """Return the checksums of each parameter's master and optimizer state. Collective.

    `shapes` are the shapes of all parameters. The host waits for the device once, beside states
    on NVMe, which are read. Call it between steps.
    """
    rows = {name: row for row, name in enumerate(sorted(shapes))}
    kinds = engine.states.kinds
    sums = torch.zeros(len(rows), len(kinds), dtype=torch.int64, device=mesh.device)
    runs = runs_to_write(engine)
    for run, tensor in zip(runs, live_tensors(engine, runs), strict=True):
        for chunk in run.chunks:
            box = tensor[: chunk.box.numel].view(chunk.box.shape)
            tensor = tensor[chunk.box.numel :]
            total = bit_sum(box, chunk.box.offsets, shapes[chunk.name])
            sums[rows[chunk.name], kinds.index(run.kind)] += total.to(mesh.device)
    flat = [int(number) for number in mesh.messages.sum_floats(sums.flatten())]
    return {name: flat[len(kinds) * row :][: len(kinds)] for name, row in rows.items()}
