"""Reads a checkpoint of any mesh straight into this mesh's shards (floor 5)."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from parallel3d.checkpoint.box import Box, overlap, overlapping
from parallel3d.checkpoint.chunks import Chunk, ChunkFile
from parallel3d.checkpoint.layout import boxes_in_whole, parameter_shapes
from parallel3d.engine import KINDS, Engine
from parallel3d.errors import CheckpointError
from parallel3d.mesh.agree import agree
from parallel3d.mesh.mesh import Mesh
from parallel3d.model.spec import LayerSpec, tied_names

_Index = Mapping[tuple[str, str], Sequence[tuple[Chunk, ChunkFile]]]


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

    Collective. Each rank reads the byte ranges that its own shards need, into their memory.
    Raises CheckpointError on all ranks if the checkpoint is of another model, or cannot be read.
    """
    check_parameters(folder, state, layers)

    def read() -> None:
        try:
            with _opened(folder, files) as index:
                _fill(folder, engine, index, tied_names(layers))
        except OSError as error:
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


@contextmanager
def _opened(folder: Path, files: Sequence[str]) -> Iterator[_Index]:
    """Where the chunks of each parameter and kind are."""
    index: dict[tuple[str, str], list[tuple[Chunk, ChunkFile]]] = defaultdict(list)
    with ExitStack() as stack:
        for name in files:
            file = stack.enter_context(ChunkFile(folder / name))
            for chunk in file.chunks:
                index[chunk.name, chunk.kind].append((chunk, file))
        for (name, kind), stored in index.items():
            # Elements are counted as they are read: one that is there twice would hide a gap.
            if twice := overlapping(chunk.box for chunk, _ in stored):
                at = list(twice[0].offsets)
                raise CheckpointError(
                    f"{folder} has elements of {name}'s {kind} twice, in the chunk at {at}; "
                    "use another checkpoint"
                )
        yield index


def _fill(folder: Path, engine: Engine, index: _Index, originals: Mapping[str, str]) -> None:
    states = engine.states
    for number, block in enumerate(states.blocks):
        with states.opened(number, write=True) as tensors:
            for piece, kinds in zip(block, tensors, strict=True):
                name = originals.get(piece.held.name, piece.held.name)
                stop = piece.start + piece.numel
                for box, at in boxes_in_whole(piece.held, piece.start, stop):
                    for kind in KINDS:
                        out = kinds[kind][at : at + box.numel].view(box.shape)
                        found = _read(index.get((name, kind), ()), box, out)
                        if found != box.numel:
                            raise CheckpointError(
                                f"{folder} has {found} of {box.numel} elements of {name}'s {kind} "
                                f"at {list(box.offsets)}; use another checkpoint"
                            )


def _read(stored: Sequence[tuple[Chunk, ChunkFile]], box: Box, out: Tensor) -> int:
    """Read all that is stored of a box into `out`, which has its shape; how many elements."""
    found = 0
    for chunk, file in stored:
        common = overlap(chunk.box, box)
        if common is not None:
            target = out
            for dim, (there, here, size) in enumerate(
                zip(common.offsets, box.offsets, common.shape, strict=True)
            ):
                target = target.narrow(dim, there - here, size)
            file.read(chunk, common, target)
            found += common.numel
    return found
