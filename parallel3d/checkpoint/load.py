"""Loading of a checkpoint of any mesh straight into this mesh's shards, or of its weights alone.

Each rank reads the headers of its share of the files, and sends the others where their chunks are.
This index is not on disk, so it cannot disagree with the files. A rank keeps no file open.
"""

import json
import zlib
from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from parallel3d.base.errors import CheckpointError
from parallel3d.checkpoint.box import Box, overlapping
from parallel3d.checkpoint.chunk_runs import boxes_in_whole
from parallel3d.checkpoint.chunks import KINDS, Chunk, ChunkFile
from parallel3d.checkpoint.find import FoundCheckpoint
from parallel3d.checkpoint.manifest import shapes_of
from parallel3d.engine import Engine, HeldParameter, writing
from parallel3d.mesh.agree import agree
from parallel3d.mesh.mesh import Mesh
from parallel3d.model.spec import LayerSpec, named_params, tied_names

Shapes = Mapping[str, Sequence[int]]


class StoredChunk(NamedTuple):
    """A chunk in a file, and the box of it that was asked for."""

    file: int  # its number among the checkpoint's
    at: int  # the first byte there
    chunk: Chunk
    common: Box


class Index:
    """The places of the chunks of some parameters.

    `rows[name]`: int64 [chunks, 1 + 2 dims + kinds], a row for each box in a file: the file's
    number, the box's offsets and shape, and where the bytes of each of KINDS begin, 0 for none.
    """

    def __init__(self, rows: Mapping[str, np.ndarray]) -> None:
        self._rows = rows

    def twice(self) -> tuple[str, str, Box] | None:
        """A parameter and kind of which two chunks share elements, and one such chunk, or None."""
        for name, rows in self._rows.items():
            seen: set[bytes] = set()  # the kinds are mostly cut alike
            for place, kind in enumerate(KINDS):
                there = rows[:, place - len(KINDS)] > 0
                if there.tobytes() not in seen:
                    seen.add(there.tobytes())
                    if pair := overlapping(_boxes(rows[there])):
                        return name, kind, pair[0]
        return None

    def find(self, name: str, kind: str, box: Box) -> Iterator[StoredChunk]:
        """The chunks that overlap a box of a parameter's kind, each with the shared box."""
        rows, dims = self._rows.get(name), len(box.shape)
        if rows is None or rows.shape[1] != 1 + 2 * dims + len(KINDS):
            return
        at = rows[:, KINDS.index(kind) - len(KINDS)]
        first, shape = rows[:, 1 : 1 + dims], rows[:, 1 + dims : 1 + 2 * dims]
        starts = np.maximum(first, box.offsets)
        sizes = np.minimum(first + shape, np.add(box.offsets, box.shape)) - starts
        for row in np.flatnonzero((at > 0) & (sizes > 0).all(axis=1)):
            stored = Box(tuple(first[row].tolist()), tuple(shape[row].tolist()))
            common = Box(tuple(starts[row].tolist()), tuple(sizes[row].tolist()))
            yield StoredChunk(int(rows[row, 0]), int(at[row]), Chunk(name, kind, stored), common)


def _boxes(rows: np.ndarray) -> list[Box]:
    dims = (rows.shape[1] - 1 - len(KINDS)) // 2
    return [Box(tuple(row[:dims]), tuple(row[dims:])) for row in rows[:, 1 : 1 + 2 * dims].tolist()]


def make_index(
    folder: Path, files: Sequence[str], shapes: Shapes, names: Iterable[str], mesh: Mesh
) -> Index:
    """The index of the parameters `names`, whose global `shapes` are given with all others'.

    Collective. Raises CheckpointError on all ranks where a file is none of chunks, or has one of a
    parameter that is not in `shapes`.
    """

    def read() -> str:
        return json.dumps(_packed_rows(folder, files, shapes, mesh))

    found = [json.loads(text) for text in mesh.gather_texts(agree(mesh, read), aside=True)]
    index = {}
    for name in names:
        width = 1 + 2 * len(shapes[name]) + len(KINDS)
        parts = b"".join(zlib.decompress(b64decode(part[name])) for part in found if name in part)
        index[name] = np.frombuffer(parts, "<i8").reshape(-1, width)
    return Index(index)


def _packed_rows(folder: Path, files: Sequence[str], shapes: Shapes, mesh: Mesh) -> dict[str, str]:
    """The rows of this rank's share of the files by parameter, as text."""
    rows: dict[str, list[list[int]]] = defaultdict(list)
    for number in range(mesh.rank, len(files), mesh.size("world")):
        boxes: dict[tuple[str, Box], list[int]] = {}
        with ChunkFile(folder / files[number]) as file:
            for chunk, at in file.chunks.items():
                if len(shapes.get(chunk.name, ())) != len(chunk.box.shape):
                    raise CheckpointError(
                        f"{file.path}: {chunk.key[:80]!r} is not of a parameter that state.json "
                        "lists; use another checkpoint"
                    )
                places = boxes.setdefault((chunk.name, chunk.box), [0] * len(KINDS))
                places[KINDS.index(chunk.kind)] = at
        for (name, box), places in boxes.items():
            rows[name].append([number, *box.offsets, *box.shape, *places])
    # Small numbers in eight bytes each: a few are left of them.
    return {
        name: b64encode(zlib.compress(np.array(own, "<i8").tobytes(), 1)).decode()
        for name, own in rows.items()
    }


def load(
    found: FoundCheckpoint, *, engine: Engine, mesh: Mesh, layers: Sequence[LayerSpec]
) -> None:
    """Fill the engine with the training state in a checkpoint that has been verified.

    Collective. Each rank reads the byte ranges of its own shards into their memory. Raises
    CheckpointError on all ranks if the checkpoint is of another model, or cannot be read.
    """
    originals = tied_names(layers)
    held = {piece.held.name for block in engine.states.blocks for piece in block}
    index = _index_of(found, layers, {originals.get(name, name) for name in held}, mesh)

    def read() -> None:
        refuse_twice(found.folder, index)
        for boxes in boxes_to_fill(engine, originals):
            reads: Reads = defaultdict(list)
            for name, box, outs in boxes:
                for kind, out in outs.items():
                    add_reads(reads, index, name, kind, box, out, folder=found.folder)
            read_all(found, reads)

    agree(mesh, lambda: reading(read))
    engine.states.finish_loading()
    engine.states.set_counters({k: found.state[k] for k in ("optimizer_steps", "loss_scale")})


def _index_of(
    found: FoundCheckpoint, layers: Sequence[LayerSpec], names: Iterable[str], mesh: Mesh
) -> Index:
    """The index of some parameters of a checkpoint, once it is seen to be of this model."""
    check_parameters(found.folder, found.state, layers)
    return make_index(found.folder, found.files, shapes_of(found.state), names, mesh)


def check_parameters(folder: Path, state: Mapping[str, Any], layers: Sequence[LayerSpec]) -> None:
    """Raise CheckpointError if a checkpoint is not of the model that these layers make."""
    stored = {name: tuple(p["shape"]) for name, p in state["parameters"].items()}
    wanted = {name: spec.shape for name, spec in named_params(layers).items()}
    for name in [*wanted, *stored]:
        if stored.get(name) != wanted.get(name):
            there = f"shape {list(stored[name])}" if name in stored else "no such parameter"
            here = f"shape {list(wanted[name])}" if name in wanted else "no such parameter"
            raise CheckpointError(
                f"{folder} is of another model: {name} has {there} there and {here} in "
                "parallel3d.model; set the model back, or start a new run with another run.name"
            )


def refuse_twice(folder: Path, index: Index) -> None:
    """Raise CheckpointError if two chunks hold the same element: in a count they hide a gap."""
    if twice := index.twice():
        name, kind, box = twice
        raise CheckpointError(
            f"{folder} has elements of {name}'s {kind} twice, in the chunk at "
            f"{list(box.offsets)}; use another checkpoint"
        )


def boxes_to_fill(
    engine: Engine, originals: Mapping[str, str]
) -> Iterator[list[tuple[str, Box, dict[str, Tensor]]]]:
    """Block by block, the boxes of whole parameters that this rank holds, and their memory.

    Each comes with its parameter's name and, by kind, a tensor [*box.shape] to be written to.
    """
    for number, block in enumerate(engine.states.blocks):
        with engine.states.opened(number, write=True) as tensors:
            yield [
                (
                    originals.get(piece.held.name, piece.held.name),
                    box,
                    {kind: kinds[kind][at : at + box.numel].view(box.shape) for kind in KINDS},
                )
                for piece, kinds in zip(block, tensors, strict=True)
                for box, at in boxes_in_whole(piece.held, piece.start, piece.start + piece.numel)
            ]


class Read(NamedTuple):
    """A stored chunk, and the memory for the part of it that is wanted."""

    stored: StoredChunk
    out: Tensor  # [*stored.common.shape]


Reads = dict[int, list[Read]]  # by the number of the file


def add_reads(
    reads: Reads, index: Index, name: str, kind: str, box: Box, out: Tensor, *, folder: Path
) -> None:
    """Add the reads that fill `out` [*box.shape]; CheckpointError where an element is missing."""
    found = list(index.find(name, kind, box))
    there = sum(stored.common.numel for stored in found)
    if there != box.numel:
        raise CheckpointError(
            f"{folder} has {there} of {box.numel} elements of {name}'s {kind} at "
            f"{list(box.offsets)}; use another checkpoint"
        )
    for stored in found:
        part = out
        for dim, (first, size) in enumerate(zip(*stored.common, strict=True)):
            part = part.narrow(dim, first - box.offsets[dim], size)
        reads[stored.file].append(Read(stored, part))


def read_all(found: FoundCheckpoint, reads: Reads) -> None:
    """Read file by file, each in the order of its chunks."""
    for number in sorted(reads):
        own = sorted(reads[number], key=lambda read: read.stored.at)
        places = {read.stored.chunk: read.stored.at for read in own}
        with ChunkFile(found.folder / found.files[number], places) as file:
            for stored, out in own:
                file.read(stored.chunk, stored.common, out)


def load_weights(
    found: FoundCheckpoint,
    held: Sequence[HeldParameter],
    mesh: Mesh,
    *,
    layers: Sequence[LayerSpec],
) -> None:
    """Fill this rank's parameters with a checkpoint's fp32 masters, cast to their own type.

    Collective. Each rank reads the byte ranges of its own parts. Raises CheckpointError on all
    ranks if the checkpoint is of another model, or cannot be read.
    """
    originals = tied_names(layers)
    names = {h.name: originals.get(h.name, h.name) for h in held}
    index = _index_of(found, layers, set(names.values()), mesh)

    def read() -> None:
        refuse_twice(found.folder, index)
        for h in held:
            reads: Reads = defaultdict(list)
            with writing(h.parameter) as (flat, start), torch.no_grad():
                # Elements beyond the part's end are ZeRO's padding.
                stop = min(start + flat.numel(), prod(h.cut.local_shape))
                if stop <= start:
                    continue
                whole = torch.empty(stop - start)
                for box, at in boxes_in_whole(h, start, stop):
                    out = whole[at : at + box.numel].view(box.shape)
                    add_reads(reads, index, names[h.name], "master", box, out, folder=found.folder)
                read_all(found, reads)
                flat[: len(whole)].copy_(whole)

    agree(mesh, lambda: reading(read))


def reading(work: Callable[[], None]) -> None:
    """Do `work`; an error of the system, as of what is offloaded to NVMe, is a CheckpointError."""
    try:
        work()
    except OSError as error:
        raise CheckpointError(str(error)) from None
