"""Load a checkpoint of any mesh directly into this mesh's shards, or only its weights.

Each rank reads the headers of its share of the files and sends the positions of their chunks to the
others. This index is not on disk, so it cannot contradict the files. No file stays open.
"""

import json
import zlib
from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from parallel3d.base.errors import CheckpointError
from parallel3d.base.reader import value_at
from parallel3d.checkpoint.chunk_runs import global_boxes
from parallel3d.checkpoint.chunks import Box, Chunk, ChunkFile, tile
from parallel3d.checkpoint.manifest import has_ema, shapes_of
from parallel3d.checkpoint.places import FoundCheckpoint
from parallel3d.checkpoint.state import ANEW
from parallel3d.engine import Engine, HeldParameter, writing
from parallel3d.mesh.agree import agree
from parallel3d.mesh.mesh import Mesh
from parallel3d.model import optimizers
from parallel3d.model.spec import LayerSpec, named_params, tied_names
from parallel3d.models.earlier import Stored, stored_in

Shapes = Mapping[str, Sequence[int]]


class StoredChunk(NamedTuple):
    """A chunk in a file, and the box to read from it."""

    file: int  # index of the file
    at: int  # first byte in the file
    chunk: Chunk
    common: Box
    """The part that is read, in the coordinates of the whole parameter."""


class Wanted(NamedTuple):
    """A box of a parameter that a rank reads."""

    name: str
    kind: str
    box: Box
    """In the coordinates of the whole parameter."""
    out: Tensor
    """The memory for it, [*box.shape]."""


class Index:
    """The positions of the chunks of some parameters."""

    def __init__(self, rows: Mapping[str, np.ndarray], kinds: Sequence[str]) -> None:
        """Create an index from a table per parameter.

        - `rows`: by parameter, int64 [boxes, 1 + 2 dims + kinds]. A row is a box in a file: index
          of the file, offsets and shape of the box, and the first byte of each kind (0 if the kind
          has no such chunk).
        - `kinds`: those that are indexed, in the order of the columns.
        """
        self._rows = rows
        self._kinds = kinds

    def check_tiling(self, folder: Path, shapes: Shapes) -> None:
        """Raise CheckpointError unless the chunks of each parameter hold each element once."""
        for name, rows in self._rows.items():
            boxes = _boxes(rows[:, : -len(self._kinds)])
            checked = set[bytes]()
            for column, kind in enumerate(self._kinds):
                stored = rows[:, column - len(self._kinds)] > 0
                if stored.any() and stored.tobytes() not in checked:
                    checked.add(stored.tobytes())  # most kinds have the same chunks
                    if not tile(compress(boxes, stored), shapes[name]):
                        raise CheckpointError(
                            f"{folder} does not have each element of {name}'s {kind} once; use "
                            "another checkpoint"
                        )

    def find(self, name: str, kind: str, box: Box) -> Iterator[StoredChunk]:
        """Yield the chunks that overlap a box of a parameter's kind, each with the shared box."""
        rows = self._rows[name]
        dims = len(box.shape)
        at = rows[:, self._kinds.index(kind) - len(self._kinds)]
        first = rows[:, 1 : 1 + dims]
        shape = rows[:, 1 + dims : 1 + 2 * dims]
        starts = np.maximum(first, box.offsets)
        sizes = np.minimum(first + shape, np.add(box.offsets, box.shape)) - starts
        for row in np.flatnonzero((at > 0) & (sizes > 0).all(axis=1)):
            stored = Box(tuple(first[row].tolist()), tuple(shape[row].tolist()))
            common = Box(tuple(starts[row].tolist()), tuple(sizes[row].tolist()))
            yield StoredChunk(int(rows[row, 0]), int(at[row]), Chunk(name, kind, stored), common)


def _boxes(rows: np.ndarray) -> list[Box]:
    """Return the boxes of rows [boxes, 1 + 2 dims], without the columns of the kinds."""
    dims = (rows.shape[1] - 1) // 2
    return [Box(tuple(row[:dims]), tuple(row[dims:])) for row in rows[:, 1:].tolist()]


def make_index(
    folder: Path,
    files: Sequence[str],
    shapes: Shapes,
    names: Iterable[str],
    mesh: Mesh,
    kinds: Sequence[str],
    share: Sequence[int] | None = None,
) -> Index:
    """Return the index of the parameters `names`. Collective.

    - `files`: names of the safetensors files in `folder`.
    - `shapes`: global shapes of all parameters in the checkpoint.
    - `names`: parameters that this rank reads.
    - `kinds`: what is read of them; chunks of other kinds are left out.
    - `share`: indices of the files whose headers this rank reads; by default an even share.

    Raises CheckpointError on all ranks if a file is not valid, or has a parameter that is not in
    `shapes`.
    """

    if share is None:
        share = range(mesh.rank, len(files), mesh.world.size)

    def read() -> str:
        return json.dumps(_packed_rows(folder, {n: files[n] for n in share}, shapes, kinds))

    shares = [
        json.loads(text) for text in mesh.messages.gather_texts(agree(mesh, read), aside=True)
    ]
    index = {}
    for name in names:
        width = 1 + 2 * len(shapes[name]) + len(kinds)
        packed = [own[name] for own in shares if name in own]
        rows = b"".join(zlib.decompress(b64decode(text)) for text in packed)
        index[name] = np.frombuffer(rows, "<i8").reshape(-1, width)
    return Index(index, kinds)


def _packed_rows(
    folder: Path, files: Mapping[int, str], shapes: Shapes, kinds: Sequence[str]
) -> dict[str, str]:
    """Return the index rows of some files, which have their index, by parameter, as text."""
    rows: dict[str, list[list[int]]] = defaultdict(list)
    for number, name in files.items():
        boxes: dict[tuple[str, Box], list[int]] = {}
        with ChunkFile(folder / name) as file:
            for chunk, at in file.chunks.items():
                if len(shapes.get(chunk.name, ())) != len(chunk.box.shape):
                    raise CheckpointError(
                        f"{file.path}: {chunk.key[:80]!r} fits no parameter in state.json; "
                        "use another checkpoint"
                    )
                if chunk.kind in kinds:
                    starts = boxes.setdefault((chunk.name, chunk.box), [0] * len(kinds))
                    starts[kinds.index(chunk.kind)] = at
        for (parameter, box), starts in boxes.items():
            rows[parameter].append([number, *box.offsets, *box.shape, *starts])
    # Rows are mostly zero bytes (small numbers in 8 bytes each), so they compress well.
    return {
        name: b64encode(zlib.compress(np.array(own, "<i8").tobytes(), 1)).decode()
        for name, own in rows.items()
    }


def load(
    checkpoint: FoundCheckpoint, *, engine: Engine, mesh: Mesh, layers: Sequence[LayerSpec]
) -> None:
    """Load the training state of a verified checkpoint into the engine. Collective.

    Each rank reads the byte ranges of its own shards directly into their memory. Averages of the
    weights begin as the weights if the checkpoint has none. Raises CheckpointError on all ranks if
    the checkpoint is of another model, or cannot be read, and TrainingError if the hosts' memory no
    longer has it.
    """
    originals = tied_names(layers)
    stored = _stored(checkpoint, layers)
    held = {piece.held.name for block in engine.states.blocks for piece in block}
    names = {stored[originals.get(n, n)].name for n in held}
    index = _index_of(checkpoint, names, mesh, engine.states.kinds)
    # The kind in the files that holds each kind of the engine.
    in_files = {kind: kind for kind in engine.states.kinds}
    if not has_ema(checkpoint.state):
        in_files[optimizers.EMA] = optimizers.MASTER

    if checkpoint.copies:
        needed = _needed(engine, index, originals, stored, in_files)
        checkpoint.copies.fetch({checkpoint.files[n] for n in needed})

    def read() -> None:
        index.check_tiling(checkpoint.folder, shapes_of(checkpoint.state))
        for boxes in boxes_to_fill(engine, originals):
            boxes = [box._replace(kind=in_files[box.kind]) for box in boxes]
            _fill(checkpoint, index, _in_files(boxes, stored))

    agree(mesh, lambda: reading(read))
    engine.states.finish_loading()
    engine.states.set_counters({k: checkpoint.state[k] for k in ("optimizer_steps", "loss_scale")})


def _stored(checkpoint: FoundCheckpoint, layers: Sequence[LayerSpec]) -> dict[str, Stored]:
    """Return the tensors that hold the parameters of these layers, by name.

    Raises CheckpointError if a checkpoint is of another model.
    """
    shapes = {name: spec.shape for name, spec in named_params(layers).items()}
    stored = stored_in(value_at(checkpoint.state, "config.parallel3d.model"), shapes)
    _check_parameters(checkpoint, {tensor.name: tensor.shape for tensor in stored.values()})
    return stored


def _in_files(boxes: Iterable[Wanted], stored: Mapping[str, Stored]) -> Iterator[Wanted]:
    """Yield the boxes of the stored tensors that hold boxes of parameters."""
    for name, kind, box, out in boxes:
        for rows, *place in stored[name].boxes(*box):
            own = Box(*place)
            yield Wanted(stored[name].name, kind, own, out[rows].view(own.shape))


def _needed(
    engine: Engine,
    index: Index,
    originals: Mapping[str, str],
    stored: Mapping[str, Stored],
    in_files: Mapping[str, str],
) -> set[int]:
    """Return the indices of the files with elements that this rank holds."""
    files: set[int] = set()
    for piece in chain.from_iterable(engine.states.blocks):
        tensor = stored[originals.get(piece.held.name, piece.held.name)]
        for box, _ in global_boxes(piece.held, piece.start, piece.start + piece.numel):
            for kind in engine.states.kinds_of(piece.held):
                for _, *place in tensor.boxes(*box):
                    found = index.find(tensor.name, in_files[kind], Box(*place))
                    files.update(chunk.file for chunk in found)
    return files


def _index_of(
    checkpoint: FoundCheckpoint,
    names: Iterable[str],
    mesh: Mesh,
    kinds: Sequence[str],
) -> Index:
    """Return the index of some of a checkpoint's parameters."""
    files = checkpoint.files
    share = None
    copies = checkpoint.copies
    if copies:
        share = [n for n, name in enumerate(files) if copies.holders[name][0] == mesh.rank]
    return make_index(
        checkpoint.folder, files, shapes_of(checkpoint.state), names, mesh, kinds, share
    )


def _check_parameters(checkpoint: FoundCheckpoint, expected: Shapes) -> None:
    """Raise CheckpointError if a checkpoint is not of the model with these parameters."""
    stored = shapes_of(checkpoint.state)
    for name in [*expected, *stored]:
        if stored.get(name) != expected.get(name):
            old = f"shape {list(stored[name])}" if name in stored else "no such parameter"
            new = f"shape {list(expected[name])}" if name in expected else "no such parameter"
            raise CheckpointError(
                f"{checkpoint.folder} is of another model: {name} has {old} there and {new} in "
                f"parallel3d.model; set the model back, or {ANEW}"
            )


def boxes_to_fill(engine: Engine, originals: Mapping[str, str]) -> Iterator[list[Wanted]]:
    """Yield, block by block, the boxes that this rank holds.

    - `originals`: the name under which a tied weight is stored, by its other names.
    """
    for number, block in enumerate(engine.states.blocks):
        with engine.states.opened(number, write=True) as tensors:
            boxes = []
            for piece, kinds in zip(block, tensors, strict=True):
                name = originals.get(piece.held.name, piece.held.name)
                for box, at in global_boxes(piece.held, piece.start, piece.start + piece.numel):
                    for kind, flat in kinds.items():
                        out = flat[at : at + box.numel].view(box.shape)
                        boxes.append(Wanted(name, kind, box, out))
            yield boxes


def _fill(checkpoint: FoundCheckpoint, index: Index, boxes: Iterable[Wanted]) -> None:
    """Read boxes of a checkpoint, file by file, in the order of the chunks.

    Raises CheckpointError if elements are missing.
    """
    # By index of the file: stored chunks, and the memory for the common part of each.
    reads: dict[int, list[tuple[StoredChunk, Tensor]]] = defaultdict(list)
    for name, kind, box, out in boxes:
        chunks = list(index.find(name, kind, box))
        count = sum(stored.common.numel for stored in chunks)
        if count != box.numel:
            raise CheckpointError(
                f"{checkpoint.folder} has {count} of {box.numel} elements of {name}'s {kind} at "
                f"{list(box.offsets)}; use another checkpoint"
            )
        for stored in chunks:
            part = out
            for dim, (first, size) in enumerate(zip(*stored.common, strict=True)):
                part = part.narrow(dim, first - box.offsets[dim], size)
            reads[stored.file].append((stored, part))
    for number in sorted(reads):
        in_order = sorted(reads[number], key=lambda read: read[0].at)
        starts = {stored.chunk: stored.at for stored, _ in in_order}
        with ChunkFile(checkpoint.folder / checkpoint.files[number], starts) as file:
            for stored, part in in_order:
                file.read(stored.chunk, stored.common, part)


def load_weights(
    checkpoint: FoundCheckpoint,
    held: Sequence[HeldParameter],
    mesh: Mesh,
    *,
    layers: Sequence[LayerSpec],
) -> None:
    """Load a checkpoint's fp32 master weights into parameters of any type. Collective.

    Each rank reads the byte ranges of its own parts. Raises CheckpointError on all ranks if the
    checkpoint is of another model, or cannot be read.

    - `held`: this rank's parameters.
    """
    originals = tied_names(layers)
    stored = _stored(checkpoint, layers)
    names = {h.name: originals.get(h.name, h.name) for h in held}
    in_files = {stored[name].name for name in names.values()}
    index = _index_of(checkpoint, in_files, mesh, ("master",))

    def read() -> None:
        index.check_tiling(checkpoint.folder, shapes_of(checkpoint.state))
        for h in held:
            with writing(h.parameter) as (flat, start), torch.no_grad():
                # Elements beyond the end of the part are ZeRO's padding.
                stop = min(start + flat.numel(), prod(h.cut.local_shape))
                if stop <= start:
                    continue
                masters = torch.empty(stop - start)
                boxes = []
                for box, at in global_boxes(h, start, stop):
                    out = masters[at : at + box.numel].view(box.shape)
                    boxes.append(Wanted(names[h.name], "master", box, out))
                _fill(checkpoint, index, _in_files(boxes, stored))
                flat[: len(masters)].copy_(masters)

    agree(mesh, lambda: reading(read))


def reading(work: Callable[[], None]) -> None:
    """Call `work` and raise a CheckpointError for OSErrors, such as those of NVMe offload."""
    try:
        work()
    except OSError as error:
        raise CheckpointError(str(error)) from None
