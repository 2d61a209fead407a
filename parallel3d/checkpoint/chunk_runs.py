"""The chunks of the training state that each rank writes, and where they lie in its memory."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from torch import Tensor

from parallel3d.checkpoint.box import Box, boxes_of, shift
from parallel3d.checkpoint.chunks import Chunk
from parallel3d.engine import KINDS, Engine, HeldParameter, ParameterPiece
from parallel3d.mesh.mesh import Mesh
from parallel3d.model.spec import LayerSpec, named_params
from parallel3d.tensor.cut import even_split


@dataclass(frozen=True)
class ChunkRun:
    """Chunks that follow each other in one flat tensor: [start, stop) of a piece's `kind`."""

    block: int
    piece: int
    kind: str
    start: int
    stop: int
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        """Number of elements in the run of chunks."""
        return self.stop - self.start


def parameter_shapes(layers: Sequence[LayerSpec]) -> dict[str, tuple[int, ...]]:
    """The global shape of every parameter that a checkpoint holds, by its global name."""
    return {name: spec.shape for name, spec in named_params(layers).items()}


def boxes_in_whole(held: HeldParameter, start: int, stop: int) -> list[tuple[Box, int]]:
    """The boxes of a whole parameter that elements [start, stop) of a rank's part fill.

    In order, with each the index of its first element, counted from `start`.
    """
    cut = held.cut
    first = [0] * len(cut.global_shape)
    if cut.dim is not None:
        first[cut.dim] = cut.start
    boxes = boxes_of(cut.local_shape, start, stop)
    return [(shift(box, tuple(first)), at) for box, at in boxes]


def runs_to_write(engine: Engine, mesh: Mesh) -> list[ChunkRun]:
    """The runs of chunks that this rank writes; all ranks together write each element once.

    A tied weight's second copy is written by nobody, what tensor parallelism does not cut by its
    first rank, and what ZeRO does not cut in even shares by its replicas.
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
