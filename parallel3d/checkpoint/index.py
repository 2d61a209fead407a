"""An index of where each chunk of a checkpoint is, on every rank, though none reads every header.

A rank reads the headers of its share of the files, and sends the others what it found. Nothing of
it is on disk: what is read anyway, to compare hashes, cannot disagree with the files. A rank keeps
no file open; who needs a chunk opens its file.
"""

import json
import zlib
from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from parallel3d.base.errors import CheckpointError
from parallel3d.checkpoint.box import Box, overlapping
from parallel3d.checkpoint.chunks import KINDS, Chunk, ChunkFile
from parallel3d.mesh.agree import agree
from parallel3d.mesh.mesh import Mesh

_Shapes = Mapping[str, Sequence[int]]


class StoredChunk(NamedTuple):
    """A chunk in a file, and the box of it that was asked for."""

    file: int
    """Which of the checkpoint's files."""
    at: int
    """Where its bytes begin there."""
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
    folder: Path, files: Sequence[str], shapes: _Shapes, names: Iterable[str], mesh: Mesh
) -> Index:
    """The index of the parameters `names`, whose global `shapes` are given with all others'.

    Collective: the ranks share the headers of `files`. Raises CheckpointError on all ranks where a
    file is none of chunks, or has one of a parameter that is not in `shapes`.
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


def _packed_rows(folder: Path, files: Sequence[str], shapes: _Shapes, mesh: Mesh) -> dict[str, str]:
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
