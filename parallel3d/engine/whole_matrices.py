"""Assemble whole matrices from their pieces on the ranks of a stage, for optimizers that need them.

ZeRO cuts flat tensors anywhere, and tensor parallelism cuts rows or columns. Each matrix therefore
has one home among the ranks of its stage (dp x tp). One exchange sends all pieces to the homes, and
one sends the results back, so each element travels twice, whatever the number of microbatches.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from math import prod
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.base.errors import ConfigError
from parallel3d.engine.optimizer_states import Place
from parallel3d.mesh.mesh import ROLES, Mesh, Peers
from parallel3d.model.matrices import deal, matrix_view, newton_schulz_cost
from parallel3d.model.optimizers import MATRIX
from parallel3d.tensor.cut import HeldParameter

Bounds = tuple[tuple[int, int], ...]


class _Share(NamedTuple):
    """A rank's elements of a hidden parameter: `numel` from `start` of its part, flattened.

    They are in an optimizer group's flat tensor, from element `offset` on. `bounds` are those of
    the rank's part before ZeRO cuts it, [start, stop) of each dim.
    """

    rank: int
    group: int
    offset: int
    start: int
    numel: int
    bounds: list[tuple[int, int]]


class _Piece(NamedTuple):
    """Elements of a matrix on a rank: they begin at `offset` of the rank's flat tensor.

    `rows` and `columns` bound the rank's part of the matrix before ZeRO cuts it, and `start` is the
    piece's first element in that part, flattened.
    """

    rank: int
    offset: int
    start: int
    numel: int
    rows: tuple[int, int]
    columns: tuple[int, int]


class Matrix(NamedTuple):
    """A matrix, the optimizer group that holds it, its home, and all pieces of it in the stage.

    `sources` are the pieces that are sent to the home: together each element once. Copies on other
    ranks only receive the result.
    """

    group: int
    home: int
    shape: tuple[int, int]
    pieces: tuple[_Piece, ...]
    sources: tuple[_Piece, ...]


class WholeMatrices:
    """The matrices of one flat tensor (an optimizer group), and their exchange in the stage."""

    def __init__(self, matrices: Iterable[Matrix], stage: Peers, device: torch.device) -> None:
        self._matrices = list(matrices)
        self._stage = stage
        self._device = device
        self._own = [m for m in self._matrices if m.home == stage.coord]
        # This rank's pieces of all matrices, by the home that they are sent to and come back from.
        self._to: list[list[_Piece]] = [[] for _ in range(stage.size)]
        self._back: list[list[_Piece]] = [[] for _ in range(stage.size)]
        for matrix in self._matrices:
            self._to[matrix.home] += [p for p in matrix.sources if p.rank == stage.coord]
            self._back[matrix.home] += [p for p in matrix.pieces if p.rank == stage.coord]
        # All pieces of the own matrices, by the rank that sends them and that gets the result.
        self._from: list[list[_Piece]] = [[] for _ in range(stage.size)]
        self._results: list[list[tuple[int, _Piece]]] = [[] for _ in range(stage.size)]
        for index, matrix in enumerate(self._own):
            for piece in matrix.sources:
                self._from[piece.rank].append(piece)
            for piece in matrix.pieces:
                self._results[piece.rank].append((index, piece))

    def map(self, flat: Tensor, function: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> Tensor:
        """Return `function` of all matrices in a flat tensor; collective over the stage.

        `function` gets the matrices whose home is this rank, [rows, columns] each, on the mesh's
        device, and returns as many of the same shapes. Elements outside matrices become 0.
        """
        result = torch.zeros_like(flat)
        if not self._matrices:
            return result
        sent = [flat.narrow(0, p.offset, p.numel) for p in chain(*self._to)]
        received = self._exchange(_joined(sent, flat), self._to, self._from)
        changed = function(self._assembled(received))
        parts = [_part(changed[index], piece) for index, piece in chain(*self._results)]
        returned = [[piece for _, piece in row] for row in self._results]
        received = self._exchange(_joined(parts, flat), returned, self._back).to(flat.device)
        pieces = list(chain(*self._back))
        values = received.split([p.numel for p in pieces])
        for piece, value in zip(pieces, values, strict=True):
            result.narrow(0, piece.offset, piece.numel).copy_(value)
        return result

    def _exchange(
        self, flat: Tensor, sent: Sequence[Sequence[_Piece]], received: Sequence[Sequence[_Piece]]
    ) -> Tensor:
        """Send consecutive parts of a flat tensor to the ranks of the stage; return theirs."""
        flat = flat.to(self._device)
        if self._stage.size == 1:
            return flat
        received_numels = [sum(piece.numel for piece in row) for row in received]
        sent_numels = [sum(piece.numel for piece in row) for row in sent]
        result = flat.new_empty(sum(received_numels))
        dist.all_to_all_single(result, flat, received_numels, sent_numels, group=self._stage.group)
        return result

    def _assembled(self, received: Tensor) -> list[Tensor]:
        """Return the matrices whose home is this rank from what their sources sent."""
        pieces = list(chain(*self._from))
        values = received.split([p.numel for p in pieces])
        by_piece = {id(p): value for p, value in zip(pieces, values, strict=True)}
        matrices = []
        for matrix in self._own:
            parts = defaultdict[Bounds, list[_Piece]](list)
            for piece in matrix.sources:
                parts[piece.rows, piece.columns].append(piece)
            whole = received.new_empty(matrix.shape)
            for (rows, columns), cut in parts.items():
                in_order = [by_piece[id(p)] for p in sorted(cut, key=attrgetter("start"))]
                part = whole[slice(*rows), slice(*columns)]
                part.copy_(torch.cat(in_order).view(part.shape))
            matrices.append(whole)
        return matrices


def _joined(tensors: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(tensors) if tensors else like.new_empty(0)


def _part(matrix: Tensor, piece: _Piece) -> Tensor:
    part = matrix[slice(*piece.rows), slice(*piece.columns)].reshape(-1)
    return part.narrow(0, piece.start, piece.numel)


def find_matrices(
    held: Sequence[HeldParameter],
    places: Iterable[Place],
    *,
    mesh: Mesh,
    stage: Peers,
    sharded: bool,
    per_head: bool,
) -> list[Matrix]:
    """Return the hidden matrices of this rank's stages, with their homes; collective over `stage`.

    - `places`: where the optimizer groups hold this rank's pieces
    - `sharded`: ZeRO cuts the groups; otherwise replicas hold copies
    - `per_head`: a matrix of each attention head, where the parameter's rows consist of heads

    Raises ConfigError on all ranks if their optimizer groups hold different parameters.
    """
    hidden = [h for h in held if h.spec.role == MATRIX]
    shares = _gather_shares(places, mesh, stage)
    views = [matrix_view(h.spec, per_head) for h in hidden]
    costs: list[int] = []
    for view in views:
        costs += [newton_schulz_cost(*view[-2:])] * prod(view[:-2])
    homes = iter(deal(costs, stage.size))
    matrices = list[Matrix]()
    tp = mesh.tensor.size  # ranks of the stage are in the order dp, tp
    sizes = {role: mesh.peers(role).size for role in ROLES}
    for h, view in zip(hidden, views, strict=True):
        group, *others = {share.group for share in shares[h.name]}
        if others:
            raise ConfigError(
                "zero_optimization.sub_group_size: splits the ranks of a stage differently, so "
                f"{h.name} is in {1 + len(others)} optimizer groups; use a larger value"
            )
        pieces: list[list[_Piece]] = [[] for _ in range(prod(view[:-2]))]
        for share in shares[h.name]:
            for matrix, piece in _pieces_in(share, view):
                pieces[matrix].append(piece)
        on_tp_alone = "tensor" in h.spec.replicated_over(sizes)  # the ranks of one tp coordinate
        for of_matrix in pieces:
            home = next(homes)
            sources = of_matrix
            if not sharded:
                sources = _of_one_replica(sources, home, tp)
            if on_tp_alone:
                sources = [p for p in sources if p.rank % tp == home % tp]
            shape = (view[-2], view[-1])
            assert sum(p.numel for p in sources) == prod(shape), h.name
            matrices.append(Matrix(group, home, shape, tuple(of_matrix), tuple(sources)))
    return matrices


def _gather_shares(places: Iterable[Place], mesh: Mesh, stage: Peers) -> dict[str, list[_Share]]:
    """Return by hidden parameter what each rank of the stage has of it; collective over them."""
    own = []
    for place in places:
        h = place.piece.held
        if h.spec.role == MATRIX:
            flat = (place.group, place.offset, place.piece.start, place.piece.numel)
            own.append((h.name, _Share(stage.coord, *flat, [*h.cut.bounds])))
    shares = defaultdict[str, list[_Share]](list)
    for text in mesh.messages.gather_texts(json.dumps(own), group=stage.group):
        for name, share in json.loads(text):
            shares[name].append(_Share(*share))
    return shares


def _of_one_replica(pieces: Sequence[_Piece], home: int, tp: int) -> list[_Piece]:
    """Return the pieces of one copy of a matrix: the home's, if it has one (with ep, perhaps not).

    Ranks of the stage with the same `rank // tp` have one copy.
    """
    holders = sorted({piece.rank // tp for piece in pieces})
    replica = home // tp
    if replica not in holders:
        replica = holders[replica % len(holders)]
    return [piece for piece in pieces if piece.rank // tp == replica]


def _pieces_in(share: _Share, view: tuple[int, ...]) -> Iterator[tuple[int, _Piece]]:
    """Yield the pieces of matrices in a rank's share of a parameter, each with its matrix's index.

    `view` is the parameter's `matrix_view`.
    """
    *outer, rows, columns = [(first, stop) for first, stop in share.bounds]
    *stack, height, _ = view
    if len(stack) > len(outer):  # rows are split into heads
        first, stop = rows
        assert first % height == stop % height == 0
        outer.append((first // height, stop // height))
        rows = (0, height)
    numbers = np.arange(prod(stack)).reshape(stack)
    matrices = numbers[tuple(slice(*bounds) for bounds in outer)].flatten()  # those of the part
    each = (rows[1] - rows[0]) * (columns[1] - columns[0])
    end = share.start + share.numel
    for number in range(share.start // each, -(-end // each)):
        first = max(share.start, number * each)
        stop = min(end, (number + 1) * each)
        piece = _Piece(
            rank=share.rank,
            offset=share.offset + first - share.start,
            start=first - number * each,
            numel=stop - first,
            rows=rows,
            columns=columns,
        )
        yield int(matrices[number]), piece
