"""Loading of a checkpoint's weights alone, without Adam's moments, into stages of any mesh."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod

import torch

from parallel3d.base.errors import CheckpointError
from parallel3d.checkpoint.chunk_runs import boxes_in_whole
from parallel3d.checkpoint.index import make_index
from parallel3d.checkpoint.load import Reads, add_reads, check_parameters, read_all, refuse_twice
from parallel3d.checkpoint.manifest import shapes_of
from parallel3d.checkpoint.resume import FoundCheckpoint
from parallel3d.engine import HeldParameter, writing
from parallel3d.mesh.agree import agree
from parallel3d.mesh.mesh import Mesh
from parallel3d.model.spec import LayerSpec, tied_names

_AT_ONCE = 2**26  # elements that are read into host memory before they are put in place


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
