"""Writes a checkpoint of many ranks in one process, by the project's own writer at each of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from parallel3d.checkpoint import chunk_runs
from parallel3d.checkpoint.manifest import Entry
from parallel3d.checkpoint.save import Saver
from parallel3d.engine import KINDS, HeldParameter, ParameterPiece
from parallel3d.model.spec import named_params
from parallel3d.models import layers
from parallel3d.tensor.cut import Cut, even_split
from tests.checkpoint.resharding import state

AXES = ("pp", "dp", "tp")


def value_of(name, kind, shape):
    """What a whole tensor holds: numbers that tell each element of each tensor from every other."""
    first = 100_000 * (sum(name.encode()) % 97) + 30_000_000 * KINDS.index(kind) / 100
    return first + torch.arange(prod(shape), dtype=torch.float32).reshape(shape)


@dataclass
class Coordinate:
    """A mesh of so many ranks, seen from one that meets no other."""

    sizes: tuple[int, int, int]
    rank: int
    local_size: int = 1

    def size(self, axis):
        return prod(self.sizes) if axis == "world" else self.sizes[AXES.index(axis)]

    def coord(self, axis):
        return int(np.unravel_index(self.rank, self.sizes)[AXES.index(axis)])

    def gather_floats(self, values):
        return [list(values)]

    def gather_texts(self, text, aside=False):
        return [text]


class States:
    """The states of a rank that ZeRO-3 gave an equal share of each parameter's part."""

    def __init__(self, mesh, model):
        params = list(named_params(model).items())
        mine = slice(*even_split(len(params), mesh.size("pp"), mesh.coord("pp")))
        pieces = (piece_of(mesh, name, spec) for name, spec in params[mine])
        self.blocks = [[piece for piece in pieces if piece.numel > 0]]

    @contextmanager
    def opened(self, number) -> Iterator[list[dict[str, torch.Tensor]]]:
        yield [
            {
                kind: part_of(value_of(piece.held.name, kind, piece.held.spec.shape), piece)
                for kind in KINDS
            }
            for piece in self.blocks[number]
        ]

    def counters(self):
        return {"optimizer_steps": 2, "loss_scale": None}


def piece_of(mesh, name, spec):
    tp, dim = mesh.size("tp"), spec.cut_dim(mesh.size("tp"))
    bounds = (0, 0) if dim is None else even_split(spec.shape[dim], tp, mesh.coord("tp"))
    parameter = nn.Parameter(torch.empty(0))
    parameter.cut = Cut(spec.shape, dim, *bounds, mesh.coord("tp"))
    numel = prod(parameter.cut.local_shape)
    share = -(-numel // mesh.size("dp"))
    start = min(numel, share * mesh.coord("dp"))
    return ParameterPiece(HeldParameter(name, parameter, spec), start, min(share, numel - start))


def part_of(whole, piece):
    cut = piece.held.cut
    part = whole if cut.dim is None else whole.narrow(cut.dim, cut.start, cut.stop - cut.start)
    return part.flatten()[piece.start : piece.start + piece.numel]


def write(folder, sizes, config, step=2):
    """A checkpoint of a mesh of these sizes, of a model whose tensors are `value_of`."""
    folder = folder / f"step-{step}"
    folder.mkdir(parents=True)
    model, files = layers(config.model), {}
    for rank in range(prod(sizes)):
        mesh = Coordinate(sizes, rank)
        engine = SimpleNamespace(
            states=States(mesh, model), settings=SimpleNamespace(shard_axis="dp")
        )
        saver = Saver(engine, mesh, model, folder=folder.parent)
        own = saver._write_own(folder, chunk_runs.host_arrays(engine, saver._runs))
        files |= {name: Entry(*entry) for name, entry in own.items()}
    done = folder.with_name("done")
    saver._name({**state(step), **saver._own_state()}, files, folder, done)
    done.rename(folder)
    return folder
