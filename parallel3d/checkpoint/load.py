"""Loading of a checkpoint of any mesh straight into this mesh's shards, or of its weights alone."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel3d.base.errors import CheckpointError
from parallel3d.checkpoint.box import Box
from parallel3d.checkpoint.chunk_runs import boxes_in_whole, parameter_shapes
from parallel3d.checkpoint.chunks import ChunkFile
from parallel3d.checkpoint.index import Index, StoredChunk, make_index
from parallel3d.checkpoint.manifest import shapes_of
from parallel3d.checkpoint.resume import FoundCheckpoint
from parallel3d.engine import KINDS, Engine, HeldParameter, writing
from parallel3d.mesh.agree import agree
from parallel3d.mesh.mesh import Mesh
from parallel3d.model.spec import LayerSpec, tied_names

_AT_ONCE = 2**26  # elements that are read into host memory before they are put in place


def load(
    folder: Path,
    files: Sequence[str],
    state: Mapping[str, Any],
    *,
    engine: Engine,
    mesh: Mesh,
    layers: Sequence[LayerSpec],
) -> None:
    """Fill the engine with the training state in a checkpoint that has been verified.

    Collective. Each rank reads the byte ranges that its own shards need, into their memory, and
    opens the files that have them, one at a time. Raises CheckpointError on all ranks if the
    checkpoint is of another model, or cannot be read.
    """
    check_parameters(folder, state, layers)
    shapes = shapes_of(state)
    originals = tied_names(layers)
    held = {piece.held.name for block in engine.states.blocks for piece in block}
    index = make_index(folder, files, shapes, {originals.get(n, n) for n in held}, mesh)

    def read() -> None:
        refuse_twice(folder, index)
        try:
            _fill(folder, files, engine, index, originals)
        except OSError as error:  # of what is offloaded to NVMe
            raise CheckpointError(str(error)) from None

    agree(mesh, read)
    engine.states.finish_loading()
    engine.states.set_counters({k: state[k] for k in ("optimizer_steps", "loss_scale")})


def check_parameters(folder: Path, state: Mapping[str, Any], layers: Sequence[LayerSpec]) -> None:
    """Raise CheckpointError if a checkpoint is not of the model that these layers make."""
    stored = {name: tuple(p["shape"]) for name, p in state["parameters"].items()}
    wanted = parameter_shapes(layers)
    for name in [*wanted, *stored]:
        if stored.get(name) != wanted.get(name):
            there = f"shape {list(stored[name])}" if name in stored else "no such parameter"
            here = f"shape {list(wanted[name])}" if name in wanted else "no such parameter"
            raise CheckpointError(
                f"{folder} is of another model: {name} has {there} there and {here} in "
                "parallel3d.model; set the model back, or start a new run with another run.name"
            )


def refuse_twice(folder: Path, index: Index) -> None:
    """Raise CheckpointError if two chunks hold the same element.

    Elements are counted before they are read, and these would hide a gap.
    """
    if twice := index.twice():
        name, kind, box = twice
        raise CheckpointError(
            f"{folder} has elements of {name}'s {kind} twice, in the chunk at "
            f"{list(box.offsets)}; use another checkpoint"
        )


def _fill(
    folder: Path, files: Sequence[str], engine: Engine, index: Index, originals: Mapping[str, str]
) -> None:
    """Read block by block, and in each file by file, so that one is open at a time."""
    states = engine.states
    for number, block in enumerate(states.blocks):
        with states.opened(number, write=True) as tensors:
            reads: Reads = defaultdict(list)
            for piece, kinds in zip(block, tensors, strict=True):
                name = originals.get(piece.held.name, piece.held.name)
                stop = piece.start + piece.numel
                for box, at in boxes_in_whole(piece.held, piece.start, stop):
                    for kind in KINDS:
                        out = kinds[kind][at : at + box.numel].view(box.shape)
                        add_reads(reads, index, name, kind, box, out, folder=folder)
            read_all(folder, files, reads)


class Read(NamedTuple):
    """A stored chunk, and the box of a parameter that a part of the chunk fills."""

    stored: StoredChunk
    box: Box
    out: Tensor
    """[*box.shape]"""


Reads = dict[int, list[Read]]
"""What is read of each file, by the file's number."""


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
        reads[stored.file].append(Read(stored, box, out))


def read_all(folder: Path, files: Sequence[str], reads: Reads) -> None:
    """Read file by file, so that one is open at a time."""
    for place in sorted(reads):
        _read(folder / files[place], reads[place])


def _read(path: Path, reads: list[Read]) -> None:
    """Read from one file, in the order in which the chunks lie there."""
    places = {read.stored.chunk: read.stored.at for read in reads}
    with ChunkFile(path, places) as file:
        for stored, box, out in sorted(reads, key=lambda read: read.stored.at):
            common = stored.common
            for dim, (there, here, size) in enumerate(
                zip(common.offsets, box.offsets, common.shape, strict=True)
            ):
                out = out.narrow(dim, there - here, size)
            file.read(stored.chunk, common, out)


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
    check_parameters(found.folder, found.state, layers)
    originals = tied_names(layers)
    names = {h.name: originals.get(h.name, h.name) for h in held}
    shapes = shapes_of(found.state)
    index = make_index(found.folder, found.files, shapes, set(names.values()), mesh)

    def read() -> None:
        refuse_twice(found.folder, index)
        for some in _batches(held):
            reads: Reads = defaultdict(list)
            values = []
            for h in some:
                with writing(h.parameter) as (flat, start):
                    # What lies beyond the part's end is ZeRO's padding.
                    stop = min(start + flat.numel(), prod(h.cut.local_shape))
                whole = torch.empty(max(0, stop - start))
                for box, at in boxes_in_whole(h, start, stop) if len(whole) else ():
                    out = whole[at : at + box.numel].view(box.shape)
                    add_reads(reads, index, names[h.name], "master", box, out, folder=found.folder)
                values.append(whole)
            read_all(found.folder, found.files, reads)
            for h, whole in zip(some, values, strict=True):
                with writing(h.parameter) as (flat, _), torch.no_grad():
                    flat[: len(whole)].copy_(whole)

    def read_or_refuse() -> None:
        try:
            read()
        except OSError as error:
            raise CheckpointError(str(error)) from None

    agree(mesh, read_or_refuse)


def _batches(held: Sequence[HeldParameter]) -> Iterator[list[HeldParameter]]:
    some: list[HeldParameter] = []
    for h in held:
        if some and sum(prod(o.cut.local_shape) for o in (*some, h)) > _AT_ONCE:
            yield some
            some = []
        some.append(h)
    if some:
        yield some
